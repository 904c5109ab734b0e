// The compiled variants of the GEMM kernels (gemm_sm90.cuh, gemm_split_sm90.cuh), and how fused.cpp reaches them.
#pragma once
#include "stof/fused.h"

// X(name, bands of 64 rows a warpgroup, columns of b (of b and b2 together), stages, cluster, ping-pong, gated, store buffers,
//   nanoseconds on an H200: of a launch, of a step of 64 along k, of what else a tile takes, of a GELU or SiLU in it)
#define STOF_GEMM_VARIANTS(X)                                                       \
  X("coop_128x256_c2", 1, 256, 4, 2, false, false, 2, 3900, 641, 2120, 1900)        \
  X("pingpong_128x128_c2", 2, 128, 5, 2, true, false, 4, 4100, 328, 630, 730)       \
  X("pingpong_128x128", 2, 128, 5, 1, true, false, 4, 3000, 335, 940, 610)          \
  X("coop_128x192", 1, 192, 4, 1, false, false, 3, 3100, 487, 2200, 1320)           \
  X("coop_128x64", 1, 64, 8, 1, false, false, 1, 2200, 267, 1460, 430)
// After those, for few rows. X(name, blocks that split the sum over k, nanoseconds as above)
#define STOF_SPLIT_VARIANTS(X)                                                      \
  X("split_128x64_k2", 2, 2500, 280, 2000, 200)                                     \
  X("split_128x64_k4", 4, 2500, 300, 2100, 200)                                     \
  X("split_128x64_k8", 8, 2500, 500, 2000, 300)
#define STOF_GATED_VARIANTS(X)                                                      \
  X("coop_128x128_c2", 1, 256, 4, 2, false, true, 2, 3500, 830, 0, 0)               \
  X("pingpong_128x64_c2", 2, 128, 5, 2, true, true, 2, 4500, 395, 10, 0)            \
  X("coop_128x64", 1, 128, 6, 1, false, true, 1, 1900, 475, 10, 0)
// X(name, bands of 64 rows a warpgroup, columns of a block, stages, store buffers, nanoseconds as above but the last)
#define STOF_NORM_VARIANTS(X)                                                       \
  X("rows128_columns192", 2, 192, 4, 2, 7100, 553, 1900)                            \
  X("rows128_columns128", 2, 128, 5, 2, 6000, 359, 1500)

namespace stof {

// `index` counts through the template's list.
cudaError_t gemm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream);
cudaError_t gemm_sm90_bf16(const FusedParams& p, int32_t index, cudaStream_t stream);
cudaError_t gemm_norm_sm90_f16(const FusedParams& p, int32_t index, cudaStream_t stream);
cudaError_t gemm_norm_sm90_bf16(const FusedParams& p, int32_t index, cudaStream_t stream);

}  // namespace stof
