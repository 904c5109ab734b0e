#include "cubin_module.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "fail.h"

namespace stof {
namespace {

template <class F>
bool find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  return function != nullptr;
}

struct Loaded {
  Driver driver{};
  char error[128] = {};
  bool ok = false;

  Loaded() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays: contexts outlive every plugin
    if (!library) {
      fail(error, sizeof error, "the CUDA driver (libcuda.so.1) is not there");
      return;
    }
    Driver& d = driver;
    find(library, "cuFuncGetParamInfo", d.func_get_param_info);
    ok = find(library, "cuGetErrorName", d.get_error_name) && find(library, "cuCtxGetCurrent", d.ctx_get_current) &&
         find(library, "cuCtxPushCurrent_v2", d.ctx_push) && find(library, "cuCtxPopCurrent_v2", d.ctx_pop) &&
         find(library, "cuModuleLoadData", d.module_load) && find(library, "cuModuleUnload", d.module_unload) &&
         find(library, "cuModuleGetFunction", d.module_get_function) && find(library, "cuFuncGetAttribute", d.func_get_attribute) &&
         find(library, "cuFuncSetAttribute", d.func_set_attribute) && find(library, "cuLaunchKernel", d.launch_kernel);
    if (!ok) fail(error, sizeof error, "the CUDA driver lacks a function: it is too old");
  }
};

// Modules that are alive, of every context. Never destroyed: plugins may go after static objects do.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<CubinModule>> modules;
};
Registry& registry() {
  static Registry* const r = new Registry;
  return *r;
}

}  // namespace

const char* Driver::name_of(CUresult status) const {
  const char* name = nullptr;
  return get_error_name(status, &name) == CUDA_SUCCESS && name ? name : "an unknown error";
}

const Driver* load_driver(char* error, size_t error_size) {
  static const Loaded* const loaded = new Loaded;
  if (loaded->ok) return &loaded->driver;
  fail(error, error_size, "%s", loaded->error);
  return nullptr;
}

CubinModule::~CubinModule() {
  // Any thread may end the last plugin. A context that is gone took its modules along.
  if (driver_.ctx_push(context_) != CUDA_SUCCESS) return;
  driver_.module_unload(module_);
  CUcontext previous;
  driver_.ctx_pop(&previous);
}

std::shared_ptr<CubinModule> load_cubin(const Driver& driver, CUcontext context, const char* image, size_t length, char* error,
                                        size_t error_size) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.modules.erase(std::remove_if(r.modules.begin(), r.modules.end(), [](const auto& weak) { return weak.expired(); }),
                  r.modules.end());
  for (const auto& weak : r.modules) {
    std::shared_ptr<CubinModule> there = weak.lock();
    if (there && there->is(context, image, length)) return there;
  }
  std::string copy(image, length);  // also aligns it
  r.modules.reserve(r.modules.size() + 1);
  CUmodule module = nullptr;
  const CUresult status = driver.module_load(&module, copy.data());
  if (status != CUDA_SUCCESS) {
    fail(error, error_size, "the driver does not load a kernel of the program: %s", driver.name_of(status));
    return nullptr;
  }
  std::shared_ptr<CubinModule> made;
  try {
    made = std::make_shared<CubinModule>(driver, context, module, std::move(copy));
  } catch (...) {
    driver.module_unload(module);
    throw;
  }
  r.modules.push_back(made);
  return made;
}

}  // namespace stof
