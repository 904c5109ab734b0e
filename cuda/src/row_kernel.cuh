// Row-wise forward attention: one warp owns one query row and touches only the keys that the row may see. No synchronisation
// between warps. For very sparse masks and short sequences, where tiles would be mostly masked scores.
// The warp collects allowed keys into a short list in shared memory, 256 columns at a time (a lane takes one byte of one tile's
// bitmap row, and the next 32 bytes are in flight meanwhile), then takes them a batch at a time: kLanes lanes share a key
// (8 elements each), 32 / kLanes groups work on different keys, kUnroll keys a group are in flight. Each group keeps its own
// online softmax; the groups are joined once at the end.
#pragma once
#include "dtype.cuh"
#include "score_mod.cuh"
#include "softmax.cuh"
#include "tile_list.cuh"

namespace stof {

constexpr int kRowWarps = 4;

// 8 elements as they lie in memory.
template <typename T>
struct Raw8 {
  static constexpr int kVectors = sizeof(T) / 2;
  uint4 vector[kVectors];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vector[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vector[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ float operator[](int i) const { return to_float(reinterpret_cast<const T*>(vector)[i]); }
};

// The part of a query row's list that a lane looks at: 8 columns of one entry.
struct RowPiece {
  int first = 0;      // key of the first column
  uint32_t bits = 0;  // allowed ones
};

__device__ __forceinline__ RowPiece row_piece(const MaskView& m, const TileList& list, int row_in_tile, int piece, int limit) {
  const int per_entry = m.tile_n / 8, entry = piece / per_entry, inner = piece % per_entry;
  RowPiece r;
  if (entry >= list.count()) return r;
  r.first = list.column(m, entry) * m.tile_n + 8 * inner;
  r.bits = 0xFF;
  if (entry >= list.full) {
    const int64_t band = static_cast<int64_t>(list.part_first + entry - list.full) * (m.tile_m / 8) + row_in_tile / 8;
    r.bits = __ldg(reinterpret_cast<const uint8_t*>(m.bitmap) + (band * per_entry + inner) * 8 + row_in_tile % 8);
  }
  const int left = limit - r.first;
  if (left < 8) r.bits &= left > 0 ? (1u << left) - 1 : 0;
  return r;
}

// kPlain: no bias, softcap or run-time key mask.
template <typename T, int kLanes, bool kPlain>
struct RowWarp {
  static constexpr int kGroups = 32 / kLanes;
  static constexpr int kUnroll = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kBatch = kGroups * kUnroll;
  static constexpr int kListSize = 256 + kBatch;

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
    if (has_k) {
      Raw8<T> raw;
      raw.load(static_cast<const T*>(p.q.ptr) + b * p.q.stride_b + h * p.q.stride_h + static_cast<int64_t>(row) * p.q.stride_s + first);
#pragma unroll
      for (int i = 0; i < 8; ++i) q[i] = raw[i];
    }
    reset();
  }
  __device__ void reset() {
    max = -INFINITY, sum = 0.f, pending = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = 0.f;
  }

  // Adds the keys of every lane's piece.
  __device__ void add(RowPiece piece) {
    if (!kPlain && modifier.kv_mask && pass == 0) {
      for (uint32_t left = piece.bits; left; left &= left - 1) {
        const int i = __ffs(left) - 1;
        if (!modifier.attends(p, piece.first + i)) piece.bits &= ~(1u << i);
      }
    }
    if (!__any_sync(~0u, piece.bits != 0)) return;
    const int count = __popc(piece.bits);
    int end = count;  // inclusive prefix sum
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
      const int below = __shfl_up_sync(~0u, end, x);
      if (lane >= x) end += below;
    }
    for (int at = pending + end - count; piece.bits; piece.bits &= piece.bits - 1) list[at++] = piece.first + __ffs(piece.bits) - 1;
    pending += __shfl_sync(~0u, end, 31);
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
    float s[kUnroll];
    Raw8<T> keys[kUnroll], values[kUnroll];
    int key[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = u * kGroups + group;
      key[u] = at < count ? list[first + at] : -1;
      keys[u].clear();
      values[u].clear();
      if (key[u] >= 0 && has_k) keys[u].load(k + static_cast<int64_t>(key[u]) * p.k.stride_s);
      if (key[u] >= 0 && has_v) values[u].load(v + static_cast<int64_t>(key[u]) * p.v.stride_s);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(q[i], keys[u][i], dot);
#pragma unroll
      for (int x = kLanes / 2; x > 0; x /= 2) dot += __shfl_xor_sync(~0u, dot, x);
      if constexpr (kPlain) s[u] = key[u] < 0 ? -INFINITY : dot * p.scale * kLog2e;
      else s[u] = key[u] < 0 ? -INFINITY : uniform ? 0.f : modifier.score(p, dot, row, key[u]);
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
    const float inverse = 1.f / sum;
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

template <typename T, int kLanes, bool kPlain>
__global__ __launch_bounds__(32 * kRowWarps, kPlain ? 8 : 5) void row_attention(const __grid_constant__ AttentionParams p, int blocks_per_head) {
  using Warp = RowWarp<T, kLanes, kPlain>;
  __shared__ int lists[kRowWarps][Warp::kListSize];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int bh = blockIdx.x / blocks_per_head, row = (blockIdx.x - bh * blocks_per_head) * kRowWarps + warp;
  const int b = bh / p.heads, h = bh - b * p.heads;
  if (row >= p.seq_q) return;

  const int limit = key_limit(p, b), tile_row = row / p.mask.tile_m, in_tile = row - tile_row * p.mask.tile_m;
  const TileList list(p.mask, mask_of(p.mask, b, h), tile_row, (limit + p.mask.tile_n - 1) / p.mask.tile_n);
  RowPiece piece = row_piece(p.mask, list, in_tile, lane, limit);
  Warp work(p, b, h, row, lists[warp]);
  const int pieces = list.count() * (p.mask.tile_n / 8);
  for (int first = 0; first < pieces; first += 32) {
    const RowPiece next = row_piece(p.mask, list, in_tile, first + 32 + lane, limit);
    work.add(piece);
    piece = next;
  }
  work.flush();
  work.join();
  if (!kPlain && work.sum == 0.f && (p.masked_row == MaskedRow::kMean || p.masked_row == MaskedRow::kScores)) {
    work.reset();
    work.pass = 1;
    work.uniform = p.masked_row == MaskedRow::kMean;
    for (int first = 8 * lane; first - 8 * lane < p.seq_kv; first += 256) {
      const int left = p.seq_kv - first;
      work.add({first, left >= 8 ? 0xFFu : left > 0 ? (1u << left) - 1 : 0u});
    }
    work.flush();
    work.join();
  }
  T* const out = static_cast<T*>(p.o.ptr) + b * p.o.stride_b + h * p.o.stride_h + static_cast<int64_t>(row) * p.o.stride_s;
  // Raw scores that are all -inf (by bias) have no softmax either.
  work.store(out + lane % kLanes * 8, p.masked_row == MaskedRow::kNan || work.pass == 1 ? NAN : 0.f);
}

}  // namespace stof
