// The compiled variants of the GEMM kernels (gemm_sm90.cuh, gemm_split_sm90.cuh), and how fused.cpp reaches them.
#pragma once
#include "stof/fused.h"

// X(name, bands of 64 rows a warpgroup, columns of b (of b and b2 together), stages, cluster, ping-pong, gated, store buffers,
//   nanoseconds on an H200 of a step of 64 along k, of what else a tile takes, and of a GELU or SiLU in it)
#define STOF_GEMM_VARIANTS(X)                                               \
  X("coop_128x256_c2", 1, 256, 4, 2, false, false, 2, 760, 1900, 1900)      \
  X("coop_128x256", 1, 256, 4, 1, false, false, 2, 780, 1900, 1900)         \
  X("pingpong_128x128_c2", 2, 128, 5, 2, true, false, 4, 400, 300, 400)     \
  X("pingpong_128x128", 2, 128, 5, 1, true, false, 4, 410, 300, 400)        \
  X("pingpong_128x192_c2", 2, 192, 4, 2, true, false, 2, 600, 400, 500)     \
  X("pingpong_128x192", 2, 192, 4, 1, true, false, 2, 610, 400, 500)        \
  X("coop_128x192_c2", 1, 192, 4, 2, false, false, 3, 580, 1500, 1500)      \
  X("coop_128x192", 1, 192, 4, 1, false, false, 3, 590, 1500, 1500)         \
  X("coop_128x128", 1, 128, 6, 1, false, false, 2, 440, 1000, 1000)
// After those, for few rows. X(name, blocks that split the sum over k, nanoseconds as above)
#define STOF_SPLIT_VARIANTS(X)              \
  X("split_128x64_k4", 4, 270, 2500, 100)   \
  X("split_128x64_k8", 8, 270, 3000, 100)
#define STOF_GATED_VARIANTS(X)                                              \
  X("coop_128x128_c2", 1, 256, 4, 2, false, true, 2, 800, 500, 0)           \
  X("coop_128x128", 1, 256, 4, 1, false, true, 2, 810, 500, 0)              \
  X("pingpong_128x64_c2", 2, 128, 5, 2, true, true, 2, 400, 300, 0)         \
  X("coop_128x64", 1, 128, 6, 1, false, true, 1, 440, 300, 0)

namespace stof {

// `index` counts through the template's list.
cudaError_t gemm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream);
cudaError_t gemm_sm90_bf16(const FusedParams& p, int32_t index, cudaStream_t stream);

}  // namespace stof
