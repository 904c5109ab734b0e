// For programs that only dlopen a plugin library (polygraphy --plugins): being loaded, this one finds the TensorRT of the
// process and has its registry load the libstof_plugins.so that lies beside it. TensorRT's own loaders need none of this.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "NvInferRuntime.h"

namespace {

// Python loads TensorRT with local symbols: its library is looked for by name.
int find_tensorrt(dl_phdr_info* info, size_t, void* found) {
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash ? slash + 1 : info->dlpi_name;
  if (std::strncmp(name, "libnvinfer.so", 13) != 0) return 0;
  *static_cast<std::string*>(found) = info->dlpi_name;
  return 1;
}

using GetRegistry = nvinfer1::IPluginRegistry* (*)() noexcept;

GetRegistry find_registry() {
  if (void* const symbol = dlsym(RTLD_DEFAULT, "getPluginRegistry")) return reinterpret_cast<GetRegistry>(symbol);
  std::string path;
  dl_iterate_phdr(find_tensorrt, &path);
  void* const library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<GetRegistry>(dlsym(library, "getPluginRegistry")) : nullptr;
}

__attribute__((constructor)) void load_plugins() {
  Dl_info self{};
  if (!dladdr(reinterpret_cast<void*>(&load_plugins), &self) || !self.dli_fname) return;
  std::string plugins = self.dli_fname;
  const size_t slash = plugins.rfind('/');
  plugins = (slash == std::string::npos ? std::string() : plugins.substr(0, slash + 1)) + "libstof_plugins.so";
  const GetRegistry registry = find_registry();
  if (!registry)
    std::fprintf(stderr, "stof: this process has not loaded TensorRT (libnvinfer.so): no plugins are registered\n");
  else if (!registry()->loadLibrary(plugins.c_str()))
    std::fprintf(stderr, "stof: TensorRT's registry does not load %s\n", plugins.c_str());
}

}  // namespace
