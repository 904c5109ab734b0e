// The compiled variants of the GEMM kernels (gemm_sm90.cuh, gemm_split_sm90.cuh), and how fused.cpp reaches them.
#pragma once
#include "stof/fused.h"

// X(name, bands of 64 rows a warpgroup, columns of b (of b and b2 together), stages, cluster, ping-pong, gated, store buffers)
#define STOF_GEMM_VARIANTS(X)                                \
  X("coop_128x256_c2", 1, 256, 4, 2, false, false, 2)        \
  X("coop_128x256", 1, 256, 4, 1, false, false, 2)           \
  X("pingpong_128x128_c2", 2, 128, 5, 2, true, false, 4)     \
  X("pingpong_128x128", 2, 128, 5, 1, true, false, 4)        \
  X("pingpong_128x192_c2", 2, 192, 4, 2, true, false, 2)     \
  X("pingpong_128x192", 2, 192, 4, 1, true, false, 2)        \
  X("coop_128x192_c2", 1, 192, 4, 2, false, false, 3)        \
  X("coop_128x192", 1, 192, 4, 1, false, false, 3)           \
  X("coop_128x128", 1, 128, 6, 1, false, false, 2)
// After those, for few rows. X(name, blocks that split the sum over k)
#define STOF_SPLIT_VARIANTS(X) \
  X("split_128x64_k4", 4)      \
  X("split_128x64_k8", 8)
#define STOF_GATED_VARIANTS(X)                               \
  X("coop_128x128_c2", 1, 256, 4, 2, false, true, 2)         \
  X("coop_128x128", 1, 256, 4, 1, false, true, 2)            \
  X("pingpong_128x64_c2", 2, 128, 5, 2, true, true, 2)       \
  X("coop_128x64", 1, 128, 6, 1, false, true, 1)

namespace stof {

// `index` counts through the template's list.
cudaError_t gemm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream);
cudaError_t gemm_sm90_bf16(const FusedParams& p, int32_t index, cudaStream_t stream);

}  // namespace stof
