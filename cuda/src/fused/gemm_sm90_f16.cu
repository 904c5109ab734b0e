#include "fused/gemm_launch.cuh"

namespace stof {

cudaError_t gemm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream) {
  return sm90::launch_variant<__half>(p, index, stream);
}

}  // namespace stof
