// What happens to a score beyond scale and bitmap: softcap, bias, run-time key padding. The switches are read at run time and
// agree for the whole grid; only the general instances contain this code.
#pragma once
#include "dtype.cuh"
#include "stof/attention.h"

namespace stof {

constexpr float kLog2e = 1.4426950408889634f;

template <typename T>
struct ScoreModifier {
  const T* bias = nullptr;        // dense: at (b, h); relative: at h
  const int32_t* kv_mask = nullptr;

  __device__ ScoreModifier(const AttentionParams& p, int b, int h) {
    if (p.bias_kind != BiasKind::kNone)
      bias = static_cast<const T*>(p.bias) + b * p.bias_stride_b * (p.bias_kind == BiasKind::kDense) + h * p.bias_stride_h;
    if (p.kv_kind == KvKind::kMask) kv_mask = p.kv + b * p.kv_stride;
  }

  // The score in log2 units. q and k need not be in range: indices are clamped.
  __device__ float score(const AttentionParams& p, float s, int q, int k) const {
    s *= p.scale;
    if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
    if (bias) {
      const int qc = min(q, p.seq_q - 1), kc = min(k, p.seq_kv - 1);
      const int64_t at = p.bias_kind == BiasKind::kDense
                             ? qc * p.bias_stride_q + kc
                             : static_cast<int64_t>(min(max(kc - qc + p.rel_rq - 1, 0), p.rel_len - 1));
      s += to_float(bias[at]);
    }
    return s * kLog2e;
  }
  __device__ bool attends(const AttentionParams& p, int k) const {
    return !kv_mask || kv_mask[min(k, p.seq_kv - 1)] != 0;
  }
};

// Keys of batch entry b that exist: S_kv, or fewer with run-time lengths.
__device__ __forceinline__ int key_limit(const AttentionParams& p, int b) {
  return p.kv_kind == KvKind::kLength ? min(max(__ldg(p.kv + b), 0), p.seq_kv) : p.seq_kv;
}

}  // namespace stof
