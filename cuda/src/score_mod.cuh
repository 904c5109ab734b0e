// What happens to a score beyond scale and bitmap: softcap, bias, run-time key padding. A key whose bias is -inf is hidden
// like a masked one. The switches are read at run time and agree for the whole grid; only the general instances contain
// this code.
#pragma once
#include <type_traits>

#include "dtype.cuh"
#include "stof/attention.h"

namespace stof {

constexpr float kLog2e = 1.4426950408889634f;

// A finite score stays finite in log2 units: a bias of the lowest finite number does not hide its key, -inf does.
__device__ __forceinline__ float to_log2(float s) { return s == -INFINITY ? s : fmaxf(s, -2.3e38f) * kLog2e; }

template <typename T>
struct ScoreModifier {
  const T* bias = nullptr;  // dense: at (b, h); relative: at h
  const int32_t* kv_mask = nullptr;

  __device__ ScoreModifier(const AttentionParams& p, int b, int h) {
    if (p.bias_kind != BiasKind::kNone)
      bias = static_cast<const T*>(p.bias) + b * p.bias_stride_b * (p.bias_kind == BiasKind::kDense) + h * p.bias_stride_h;
    if (p.kv_kind == KvKind::kMask) kv_mask = p.kv + b * p.kv_stride;
  }

  // Of indices that are out of range, which happens in tiles that stick out, the last in range stands in.
  __device__ float bias_at(const AttentionParams& p, int q, int k) const {
    q = min(q, p.seq_q - 1), k = min(k, p.seq_kv - 1);
    if (p.bias_kind == BiasKind::kDense) return to_float(bias[q * p.bias_stride_q + k]);
    return to_float(bias[min(max(k - q + p.rel_rq - 1, 0), p.rel_len - 1)]);
  }
  __device__ bool attends(const AttentionParams& p, int k) const { return kv_mask[min(k, p.seq_kv - 1)] != 0; }

  // One score in log2 units.
  __device__ float score(const AttentionParams& p, float s, int q, int k) const {
    s *= p.scale;
    if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
    if (bias) s += bias_at(p, q, k);
    return to_log2(s);
  }

  // The scores of a band of 16 rows in the accumulator layout of mma: rows q and q + 8, columns 8j + k and k + 1.
  template <int kBlocks8>
  __device__ void apply(const AttentionParams& p, float (&s)[kBlocks8][4], int q, int k, bool padding) const {
    const bool plain = p.softcap <= 0.f && !bias;
    const bool done = !plain && p.bias_kind == BiasKind::kRelative && p.softcap <= 0.f && add_relative(p, s, q, k);
    if (!done) {
      const float scale = plain ? p.scale * kLog2e : p.scale;
      each(s, [&](float& x, int, int) { x *= scale; });
    }
    if (!plain && !done) {
      if (p.softcap > 0.f) each(s, [&](float& x, int, int) { x = p.softcap * tanhf(x / p.softcap); });
      if (bias) each(s, [&](float& x, int row, int column) { x += bias_at(p, q + row, k + column); });
      each(s, [&](float& x, int, int) { x = to_log2(x); });
    }
    if (padding && kv_mask) {
#pragma unroll
      for (int j = 0; j < kBlocks8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!attends(p, k + 8 * j + e)) s[j][e] = s[j][2 + e] = -INFINITY;
      }
    }
  }

 private:
  // Scale, relative bias, log2 units, where all indices of the band are in range. A bias belongs to a distance: that of row
  // q + 8 and column 8j + k is the one of row q and column 8(j - 1) + k, and is loaded once for both.
  template <int kBlocks8>
  __device__ bool add_relative(const AttentionParams& p, float (&s)[kBlocks8][4], int q, int k) const {
    const int first = k - q - 8 + p.rel_rq - 1;
    if (first < 0 || first + 8 * kBlocks8 + 1 >= p.rel_len) return false;
    const T* const at = bias + first;
    constexpr bool kNarrow = std::is_same_v<T, __half>;  // no fp16 bias leaves the range of fp32 in log2 units
    const float scale = kNarrow ? p.scale * kLog2e : p.scale;
    float low[2], high[2];
#pragma unroll
    for (int j = 0; j <= kBlocks8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        high[e] = to_float(at[8 * j + e]) * (kNarrow ? kLog2e : 1.f);
        if (j > 0) {
          s[j - 1][e] = s[j - 1][e] * scale + high[e];
          s[j - 1][2 + e] = s[j - 1][2 + e] * scale + low[e];
          if (!kNarrow) s[j - 1][e] = to_log2(s[j - 1][e]), s[j - 1][2 + e] = to_log2(s[j - 1][2 + e]);
        }
        low[e] = high[e];
      }
    }
    return true;
  }

  template <int kBlocks8, typename Function>
  __device__ static void each(float (&s)[kBlocks8][4], Function function) {
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) function(s[j][c], 8 * (c / 2), 8 * j + c % 2);
  }
};

// Keys of batch entry b that exist: S_kv, or fewer with run-time lengths.
__device__ __forceinline__ int key_limit(const AttentionParams& p, int b) {
  return p.kv_kind == KvKind::kLength ? min(max(__ldg(p.kv + b), 0), p.seq_kv) : p.seq_kv;
}

}  // namespace stof
