// Cubins loaded through the CUDA driver, which is found at run time: the library links no libcuda.
#pragma once
#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

namespace stof {

// The driver's functions that launches need; null before `load_driver`.
struct Driver {
  CUresult (*get_error_name)(CUresult, const char**);
  CUresult (*ctx_get_current)(CUcontext*);
  CUresult (*ctx_push)(CUcontext);
  CUresult (*ctx_pop)(CUcontext*);
  CUresult (*module_load)(CUmodule*, const void*);
  CUresult (*module_unload)(CUmodule);
  CUresult (*module_get_function)(CUfunction*, CUmodule, const char*);
  CUresult (*func_get_attribute)(int*, CUfunction_attribute, CUfunction);
  CUresult (*func_set_attribute)(CUfunction, CUfunction_attribute, int);
  CUresult (*func_get_param_info)(CUfunction, size_t, size_t*, size_t*);  // null before CUDA 12.4
  CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**,
                            void**);

  const char* name_of(CUresult status) const;
};

// The driver; nullptr, with the reason in `error`, where there is none. Thread-safe; looks once.
const Driver* load_driver(char* error, size_t error_size);

// A cubin in a context. Unloads itself.
class CubinModule {
 public:
  CubinModule(const Driver& driver, CUcontext context, CUmodule module, std::string image)
      : driver_(driver), context_(context), module_(module), image_(std::move(image)) {}
  ~CubinModule();
  CubinModule(const CubinModule&) = delete;
  CubinModule& operator=(const CubinModule&) = delete;

  CUmodule get() const { return module_; }
  bool is(CUcontext context, const char* image, size_t length) const {
    return context == context_ && image_.compare(0, image_.size(), image, length) == 0;
  }

 private:
  const Driver& driver_;
  CUcontext context_;
  CUmodule module_;
  std::string image_;
};

// The module of a cubin in the current context `context`: equal cubins are loaded once in each context. Null, with the
// reason in `error`, where the driver refuses it. Thread-safe. Throws std::bad_alloc.
std::shared_ptr<CubinModule> load_cubin(const Driver& driver, CUcontext context, const char* image, size_t length, char* error,
                                        size_t error_size);

}  // namespace stof
