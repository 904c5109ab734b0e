#include "fused/gemm_norm_launch.cuh"

namespace stof {

cudaError_t gemm_norm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream) {
  return sm90::launch_norm_variant<__half>(p, index, stream);
}

}  // namespace stof
