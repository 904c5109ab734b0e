// Row-wise forward attention: one warp owns one query row and touches only the keys that the row may see. No synchronisation
// between warps. For very sparse masks and short sequences, where tiles would be mostly masked scores.
// The warp collects allowed keys from bitmaps into a short list in shared memory, then takes them a batch at a time:
// kLanes lanes share a key (8 elements each), 32 / kLanes groups work on different keys, kUnroll keys a group are in flight.
// Each group keeps its own online softmax; the groups are joined once at the end.
#pragma once
#include "dtype.cuh"
#include "score_mod.cuh"
#include "softmax.cuh"
#include "tile_list.cuh"

namespace stof {

constexpr int kRowWarps = 4;

// The bits of query row `row` (within the tile) and columns 64 * chunk ... of a part tile, in the kTiles order.
__device__ __forceinline__ uint64_t row_bits(const MaskView& m, int entry, int row, int chunk, int lane) {
  const int inner_n = m.tile_n / 8, column = chunk * 8 + lane % 8;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(m.bitmap);
  const int64_t word = (static_cast<int64_t>(entry) * (m.tile_m / 8) + row / 8) * inner_n + column;
  const uint32_t byte = lane < 8 && column < inner_n ? __ldg(bytes + word * 8 + row % 8) : 0;
  const uint32_t low = __reduce_or_sync(~0u, lane < 4 ? byte << (8 * lane) : 0);
  const uint32_t high = __reduce_or_sync(~0u, lane >= 4 ? byte << (8 * (lane % 4)) : 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

// 8 elements at p as fp32.
template <typename T>
__device__ __forceinline__ void load8(float (&x)[8], const T* p) {
#pragma unroll
  for (int i = 0; i < 8; i += Vec16<T>::kSize) {
    float part[Vec16<T>::kSize];
    Vec16<T>::load(part, p + i);
#pragma unroll
    for (int e = 0; e < Vec16<T>::kSize; ++e) x[i + e] = part[e];
  }
}

template <typename T, int kLanes>
struct RowWarp {
  static constexpr int kGroups = 32 / kLanes;
  static constexpr int kUnroll = 4;
  static constexpr int kBatch = kGroups * kUnroll;
  static constexpr int kListSize = 64 + kBatch;

  const AttentionParams& p;
  const T* k;
  const T* v;
  const ScoreModifier<T> modifier;
  int* const list;
  const int lane, row;
  bool has_k, has_v;
  float q[8], o[8], max, sum;
  int pending;
  bool uniform;  // all scores 0: the mean of V

  __device__ RowWarp(const AttentionParams& p_, int b, int h, int row_, int* list_)
      : p(p_), modifier(p_, b, h), list(list_), lane(threadIdx.x % 32), row(row_), uniform(false) {
    const int kv_head = h / (p.heads / p.kv_heads), first = lane % kLanes * 8;
    k = static_cast<const T*>(p.k.ptr) + b * p.k.stride_b + kv_head * p.k.stride_h + first;
    v = static_cast<const T*>(p.v.ptr) + b * p.v.stride_b + kv_head * p.v.stride_h + first;
    has_k = first < p.dim;
    has_v = first < p.v_dim;
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = 0.f;
    if (has_k)
      load8(q, static_cast<const T*>(p.q.ptr) + b * p.q.stride_b + h * p.q.stride_h + static_cast<int64_t>(row) * p.q.stride_s + first);
    reset();
  }
  __device__ void reset() {
    max = -INFINITY, sum = 0.f, pending = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = 0.f;
  }

  // Adds the keys first + i of the set bits i, below `limit`.
  __device__ void add(uint64_t bits, int first, int limit) {
    if (limit - first < 64) bits = limit > first ? bits & ((uint64_t{1} << (limit - first)) - 1) : 0;
    const uint32_t half[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool allowed = half[i] >> lane & 1;
      const int key = first + 32 * i + lane;
      if (allowed && modifier.kv_mask && pass == 0) allowed = modifier.attends(p, key);
      const uint32_t chosen = __ballot_sync(~0u, allowed);
      if (allowed) list[pending + __popc(chosen & ((1u << lane) - 1))] = key;
      pending += __popc(chosen);
    }
    __syncwarp();
    int done = 0;
    for (; pending - done >= kBatch; done += kBatch) batch(done, kBatch);
    if (done > 0) {
      pending -= done;  // fewer than a batch, so at most 32
      const int moved = lane < pending ? list[done + lane] : 0;
      __syncwarp();
      if (lane < pending) list[lane] = moved;
      __syncwarp();
    }
  }
  __device__ void flush() {
    if (pending > 0) batch(0, pending);
    pending = 0;
  }

  __device__ void batch(int first, int count) {
    const int group = lane / kLanes;
    float s[kUnroll], values[kUnroll][8];
    int key[kUnroll];
    {
      float keys[kUnroll][8];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = u * kGroups + group;
        key[u] = at < count ? list[first + at] : -1;
#pragma unroll
        for (int i = 0; i < 8; ++i) keys[u][i] = values[u][i] = 0.f;
        if (key[u] >= 0 && has_k) load8(keys[u], k + static_cast<int64_t>(key[u]) * p.k.stride_s);
        if (key[u] >= 0 && has_v) load8(values[u], v + static_cast<int64_t>(key[u]) * p.v.stride_s);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot = fmaf(q[i], keys[u][i], dot);
#pragma unroll
        for (int x = kLanes / 2; x > 0; x /= 2) dot += __shfl_xor_sync(~0u, dot, x);
        s[u] = -INFINITY;
        if (key[u] >= 0) {
          s[u] = uniform ? 0.f : modifier.score(p, dot, row, key[u]);
        }
      }
    }
    float top = max;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) top = fmaxf(top, s[u]);
    const float reference = top == -INFINITY ? 0.f : top;
    const float correction = max == top ? 1.f : exp2_approx(max - reference);
    max = top;
    sum *= correction;
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] *= correction;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const float weight = exp2_approx(s[u] - reference);
      sum += weight;
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] = fmaf(weight, values[u][i], o[i]);
    }
  }

  // Joins the groups; afterwards every group holds the result.
  __device__ void join() {
#pragma unroll
    for (int x = kLanes; x < 32; x *= 2) {
      const float other_max = __shfl_xor_sync(~0u, max, x), other_sum = __shfl_xor_sync(~0u, sum, x);
      const float top = fmaxf(max, other_max);
      const float mine = max == top ? 1.f : exp2_approx(max - top), theirs = other_max == top ? 1.f : exp2_approx(other_max - top);
      sum = sum * mine + other_sum * theirs;
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] = o[i] * mine + __shfl_xor_sync(~0u, o[i], x) * theirs;
      max = top;
    }
  }
  __device__ void store(T* out, float unseen) const {
    if (lane >= kLanes || !has_v) return;
    const float inverse = max == kLowest ? NAN : 1.f / sum;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sum != 0.f ? o[i] * inverse : unseen;
#pragma unroll
    for (int i = 0; i < 8; i += Vec16<T>::kSize) {
      float part[Vec16<T>::kSize];
#pragma unroll
      for (int e = 0; e < Vec16<T>::kSize; ++e) part[e] = x[i + e];
      Vec16<T>::store(out + i, part);
    }
  }

  int pass = 0;
};

template <typename T, int kLanes>
__global__ __launch_bounds__(32 * kRowWarps) void row_attention(const __grid_constant__ AttentionParams p, int blocks_per_head) {
  using Warp = RowWarp<T, kLanes>;
  __shared__ int lists[kRowWarps][Warp::kListSize];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int bh = blockIdx.x / blocks_per_head, row = blockIdx.x % blocks_per_head * kRowWarps + warp;
  const int b = bh / p.heads, h = bh % p.heads;
  if (row >= p.seq_q) return;
  Warp work(p, b, h, row, lists[warp]);

  const int limit = key_limit(p, b), mask = mask_of(p.mask, b, h), mask_row = row / p.mask.tile_m;
  const int chunks = (p.mask.tile_n + 63) / 64;
  const TileList list(p.mask, mask, mask_row, (limit + p.mask.tile_n - 1) / p.mask.tile_n);
  for (int i = 0; i < list.count(); ++i) {
    const int first = list.column(p.mask, i) * p.mask.tile_n;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint64_t bits = ~uint64_t{0};
      if (i >= list.full) bits = row_bits(p.mask, list.part_first + i - list.full, row % p.mask.tile_m, chunk, lane);
      work.add(bits, first + 64 * chunk, min(limit, first + p.mask.tile_n));
    }
  }
  work.flush();
  work.join();
  if (work.sum == 0.f && (p.masked_row == MaskedRow::kMean || p.masked_row == MaskedRow::kScores)) {
    work.reset();
    work.pass = 1;
    work.uniform = p.masked_row == MaskedRow::kMean;
    for (int first = 0; first < p.seq_kv; first += 64) work.add(~uint64_t{0}, first, p.seq_kv);
    work.flush();
    work.join();
  }
  T* const out = static_cast<T*>(p.o.ptr) + b * p.o.stride_b + h * p.o.stride_h + static_cast<int64_t>(row) * p.o.stride_s;
  work.store(out + lane % kLanes * 8, p.masked_row == MaskedRow::kNan ? NAN : 0.f);
}

}  // namespace stof
