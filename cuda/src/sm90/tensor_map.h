// The driver's encoder of tensor maps, found at run time: nothing links libcuda.
#pragma once
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace stof::sm90 {

using EncodeTiled = PFN_cuTensorMapEncodeTiled_v12000;

// nullptr where the driver has none.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(pointer)
                                                                        : nullptr;
  }();
  return function;
}

}  // namespace stof::sm90
