// Online softmax over tiles, in the accumulator layout of mma.m16n8: a lane holds rows lane/4 and lane/4 + 8.
#pragma once
#include <cmath>

#include "ptx.cuh"

namespace stof {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Running maximum of the scores (all lanes of a quad agree) and this lane's share of the sum of 2^((s - max) * log2_scale).
struct RowState {
  float max = -INFINITY;
  float sum = 0.f;
};

// Turns the scores of one tile into unnormalised probabilities and rescales what was accumulated before.
// kBlocks8 n8 blocks of scores, kOut8 n8 blocks of output; log2_scale > 0.
template <int kBlocks8, int kOut8>
__device__ __forceinline__ void online_softmax(float (&s)[kBlocks8][4], float (&o)[kOut8][4], RowState (&rows)[2],
                                               float log2_scale) {
  float reference[2], correction[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
#pragma unroll
    for (int j = 1; j < kBlocks8; ++j) top = fmaxf(top, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
    top = fmaxf(rows[i].max, quad_max(top));
    // A row that has seen no key yet keeps -inf as its maximum; 0 stands in so that exp2(-inf) is 0 and not NaN.
    reference[i] = top == -INFINITY ? 0.f : top * log2_scale;
    correction[i] = rows[i].max == top ? 1.f : exp2_approx((rows[i].max - top) * log2_scale);
    rows[i].sum *= correction[i];
    rows[i].max = top;
  }
  // Maxima settle after a few tiles; then the whole warp may skip the rescaling.
  if (__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) {
#pragma unroll
    for (int j = 0; j < kOut8; ++j) {
      o[j][0] *= correction[0], o[j][1] *= correction[0];
      o[j][2] *= correction[1], o[j][3] *= correction[1];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[j][2 * i + e] = exp2_approx(fmaf(s[j][2 * i + e], log2_scale, -reference[i]));
        sum += s[j][2 * i + e];
      }
    }
    rows[i].sum += sum;
  }
}

}  // namespace stof
