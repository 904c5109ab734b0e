// Launch of one instance of the block-wise kernel.
#pragma once
#include "block_kernel.cuh"
#include "instances.h"

namespace stof {

template <class Traits>
cudaError_t launch_block(const AttentionParams& p, cudaStream_t stream) {
  const Schedule s = make_schedule(p, p.mask.tile_m / Traits::kRows);
  const int64_t blocks = s.blocks();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = block_attention<Traits>;
  // Sets an attribute of the function on the current device: cheap, idempotent, allowed during stream capture.
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
      error != cudaSuccess)
    return error;
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes, stream>>>(p, s, Traits::kGeneral ? 1.f : p.scale * kLog2e);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_combine(p, s, Traits::kRows, stream);
}

template <class Traits>
constexpr BlockInstance block_instance(DType dtype, bool tensor_cores = false) {
  return {dtype, Traits::kDim, Traits::kRows, Traits::kCols, Traits::kGeneral, tensor_cores, launch_block<Traits>};
}

}  // namespace stof
