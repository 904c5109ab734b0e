#include "fused/cublaslt.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <tuple>

namespace stof {
namespace {

// Of cublasLt.h and cublas_api.h, versions 11 to 13; their numbers are part of the library's binary interface.
using Status = int;  // 0: success
using Handle = void*;
using Object = void*;  // a description, a layout or a preference
enum { kCompute32F = 68, kReal32F = 0, kReal16F = 2, kReal16BF = 14 };
enum { kDescEpilogue = 7, kDescBiasPointer = 8 };
enum { kPreferWorkspace = 1, kPreferReductions = 3, kPreferAlignments = 5 };  // of a, b, c, d
enum { kEpilogueNone = 1, kEpilogueRelu = 2, kEpilogueBias = 4, kEpilogueGelu = 32 };
enum { kReduceInFp32 = 2 };  // not in place: partial sums are added in a fixed order
struct Algorithm {
  uint64_t data[8];
};
struct Found {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

struct Library {
  Status (*create)(Handle*);
  size_t (*version)();
  Status (*desc_create)(Object*, int compute, int scale);
  Status (*desc_destroy)(Object);
  Status (*desc_set)(Object, int attribute, const void*, size_t);
  Status (*layout_create)(Object*, int type, uint64_t rows, uint64_t columns, int64_t stride);
  Status (*layout_destroy)(Object);
  Status (*preference_create)(Object*);
  Status (*preference_destroy)(Object);
  Status (*preference_set)(Object, int attribute, const void*, size_t);
  Status (*heuristic)(Handle, Object, Object a, Object b, Object c, Object d, Object preference, int wanted, Found*, int* found);
  Status (*matmul)(Handle, Object, const void* alpha, const void* a, Object, const void* b, Object, const void* beta, const void* c,
                   Object, void* d, Object, const Algorithm*, void* workspace, size_t, cudaStream_t);
  char problem[192];  // empty when all of it is there
};

template <class Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

Library open_library() {
  Library lt{};
  void* file = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"})
    if (!file) file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!file) {
    std::snprintf(lt.problem, sizeof lt.problem,
                  "cuBLASLt was not found (libcublasLt.so.11 to .13): install it, or add its folder to LD_LIBRARY_PATH");
    return lt;
  }
  const bool complete =
      load(file, "cublasLtCreate", lt.create) && load(file, "cublasLtGetVersion", lt.version) &&
      load(file, "cublasLtMatmulDescCreate", lt.desc_create) && load(file, "cublasLtMatmulDescDestroy", lt.desc_destroy) &&
      load(file, "cublasLtMatmulDescSetAttribute", lt.desc_set) && load(file, "cublasLtMatrixLayoutCreate", lt.layout_create) &&
      load(file, "cublasLtMatrixLayoutDestroy", lt.layout_destroy) &&
      load(file, "cublasLtMatmulPreferenceCreate", lt.preference_create) &&
      load(file, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy) &&
      load(file, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set) &&
      load(file, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic) && load(file, "cublasLtMatmul", lt.matmul);
  const size_t version = complete ? lt.version() : 0;
  if (version < 110400 || version >= 140000)
    std::snprintf(lt.problem, sizeof lt.problem, "cuBLASLt has version %zu, 11.4 to 13 are known here", version);
  return lt;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

// What an algorithm is chosen for.
using Key = std::tuple<int, DType, Activation, int32_t, int32_t, int32_t, int64_t, int64_t, int64_t, int64_t, bool, bool>;

struct Known {
  std::mutex mutex;
  std::map<int, Handle> handles;  // by device; they live as long as the process
  std::map<Key, Algorithm> algorithms;
};
constexpr size_t kMostAlgorithms = 4096;

Known& known() {
  static Known* const state = new Known;  // never destroyed: launches may come from other libraries' destructors
  return *state;
}

// An object of the library that ends with its scope.
struct Owned {
  Object object = nullptr;
  Status (*destroy)(Object);
  explicit Owned(Status (*end)(Object)) : destroy(end) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object) destroy(object);
  }
};

// The library's matrices are column-major: it computes out^T = b^T a^T, and its bias runs along n.
struct Call {
  const Library& lt;
  Owned desc{lt.desc_destroy}, a{lt.layout_destroy}, b{lt.layout_destroy}, c{lt.layout_destroy}, d{lt.layout_destroy};

  explicit Call(const Library& lt) : lt(lt) {}

  bool make(const FusedParams& p) {
    const int type = p.dtype == DType::kF16 ? kReal16F : kReal16BF;
    const int64_t stride_c = p.residual ? p.stride_residual : p.stride_out;
    const int activation = p.activation == Activation::kRelu ? kEpilogueRelu : p.activation == Activation::kGeluTanh ? kEpilogueGelu : 0;
    const int bits = activation | (p.bias ? kEpilogueBias : 0);
    const int epilogue = bits ? bits : kEpilogueNone;
    return !lt.desc_create(&desc.object, kCompute32F, kReal32F) && !lt.desc_set(desc.object, kDescEpilogue, &epilogue, sizeof epilogue) &&
           (!p.bias || !lt.desc_set(desc.object, kDescBiasPointer, &p.bias, sizeof p.bias)) &&
           !lt.layout_create(&b.object, type, p.n, p.k, p.stride_b) && !lt.layout_create(&a.object, type, p.k, p.m, p.stride_a) &&
           !lt.layout_create(&c.object, type, p.n, p.m, stride_c) && !lt.layout_create(&d.object, type, p.n, p.m, p.stride_out);
  }

  bool choose(Handle handle, Algorithm& algorithm) const {
    Owned preference(lt.preference_destroy);
    const size_t workspace = kCublasLtWorkspace;
    const uint32_t reductions = kReduceInFp32, alignment = 16;
    if (lt.preference_create(&preference.object) ||
        lt.preference_set(preference.object, kPreferWorkspace, &workspace, sizeof workspace) ||
        lt.preference_set(preference.object, kPreferReductions, &reductions, sizeof reductions))
      return false;
    for (int i = 0; i < 4; ++i)
      if (lt.preference_set(preference.object, kPreferAlignments + i, &alignment, sizeof alignment)) return false;
    Found found{};
    int count = 0;
    if (lt.heuristic(handle, desc.object, b.object, a.object, c.object, d.object, preference.object, 1, &found, &count) || count < 1 ||
        found.state)
      return false;
    algorithm = found.algorithm;
    return true;
  }
};

}  // namespace

const char* cublaslt_problem() { return library().problem[0] ? library().problem : nullptr; }

const char* cublaslt_lacks(const FusedParams& p) {
  if (p.template_id != FusedTemplate::kGemmEpilogue || p.rotation) return "cuBLASLt has neither gates nor rotations";
  if (p.activation != Activation::kNone && p.activation != Activation::kRelu && p.activation != Activation::kGeluTanh)
    return "of the activations, cuBLASLt has ReLU and the tanh form of GELU only";
  if (p.residual && p.activation != Activation::kNone) return "cuBLASLt adds a residual ahead of the activation";
  return nullptr;
}

cudaError_t cublaslt_prepare() {
  const Library& lt = library();
  if (lt.problem[0]) return cudaErrorNotSupported;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const std::lock_guard<std::mutex> lock(known().mutex);
  Handle& handle = known().handles[device];
  if (handle) return cudaSuccess;
  return lt.create(&handle) ? cudaErrorInitializationError : cudaSuccess;
}

cudaError_t cublaslt_launch(const FusedParams& p, cudaStream_t stream) {
  if (const cudaError_t error = cublaslt_prepare()) return error;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  Call call(library());
  if (!call.make(p)) return cudaErrorNotSupported;
  const Key key{device, p.dtype, p.activation, p.m, p.n, p.k, p.stride_a, p.stride_b, p.residual ? p.stride_residual : 0,
                p.stride_out, p.bias != nullptr, p.residual != nullptr};
  Handle handle;
  Algorithm algorithm;
  {
    Known& state = known();
    const std::lock_guard<std::mutex> lock(state.mutex);
    handle = state.handles[device];
    const auto found = state.algorithms.find(key);
    if (found != state.algorithms.end()) {
      algorithm = found->second;
    } else {
      if (!call.choose(handle, algorithm)) return cudaErrorNotSupported;
      if (state.algorithms.size() >= kMostAlgorithms) state.algorithms.clear();
      state.algorithms.emplace(key, algorithm);
    }
  }
  const float one = 1.0f, beta = p.residual ? 1.0f : 0.0f;
  const void* const c = p.residual ? p.residual : p.out;
  const Status status = call.lt.matmul(handle, call.desc.object, &one, p.b, call.b.object, p.a, call.a.object, &beta, c, call.c.object,
                                       p.out, call.d.object, &algorithm, p.workspace, p.workspace_bytes, stream);
  return status ? cudaErrorLaunchFailure : cudaGetLastError();
}

}  // namespace stof
