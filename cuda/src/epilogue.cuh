// From accumulators to memory: whole rows through shared memory, single pairs, or unnormalised partial results of a split.
#pragma once
#include "dtype.cuh"
#include "schedule.h"
#include "smem_tile.cuh"
#include "softmax.cuh"

namespace stof {

// A slot of the split workspace: kRows x v_dim fp32, then kRows x (maximum in log2 units, sum).
__device__ __forceinline__ float* slot_output(const AttentionParams& p, int kernel_rows, int slot) {
  return static_cast<float*>(p.workspace) + static_cast<int64_t>(slot) * kernel_rows * (p.v_dim + 2);
}
__device__ __forceinline__ float* slot_state(const AttentionParams& p, int kernel_rows, int slot) {
  return slot_output(p, kernel_rows, slot) + static_cast<int64_t>(kernel_rows) * p.v_dim;
}

// One band of 16 rows; `local` is the lane's first row in the kernel tile, columns 8d + 2 * (lane % 4).
template <int kOut8>
__device__ __forceinline__ void store_partial(const AttentionParams& p, int kernel_rows, int slot, int local, int lane,
                                              const float (&o)[kOut8][4], const RowState (&rows)[2], float log2_scale) {
  float* const output = slot_output(p, kernel_rows, slot);
  float* const state = slot_state(p, kernel_rows, slot);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = local + 8 * i;
#pragma unroll
    for (int d = 0; d < kOut8; ++d) {
      const int column = 8 * d + 2 * (lane % 4);
      if (column < p.v_dim)
        *reinterpret_cast<float2*>(output + static_cast<int64_t>(row) * p.v_dim + column) = make_float2(o[d][2 * i], o[d][2 * i + 1]);
    }
    if (lane % 4 == 0) *reinterpret_cast<float2*>(state + 2 * row) = make_float2(rows[i].max * log2_scale, rows[i].sum);
  }
}

// Normalises one row half of a band: what it holds where no key was seen is `unseen`.
template <int kOut8>
__device__ __forceinline__ void normalise(float (&o)[kOut8][4], int i, const RowState& row, float unseen) {
  const float inverse = __fdividef(1.f, row.sum);
#pragma unroll
  for (int d = 0; d < kOut8; ++d) o[d][2 * i] *= inverse, o[d][2 * i + 1] *= inverse;
  if (row.sum == 0.f) {
#pragma unroll
    for (int d = 0; d < kOut8; ++d) o[d][2 * i] = o[d][2 * i + 1] = unseen;
  }
}

template <typename T, int kOut8>
__device__ __forceinline__ void store_row_pairs(T* row, const float (&o)[kOut8][4], int i, int lane, int v_dim) {
#pragma unroll
  for (int d = 0; d < kOut8; ++d) {
    const int column = 8 * d + 2 * (lane % 4);
    if (column < v_dim) store_pair(row + column, o[d][2 * i], o[d][2 * i + 1]);
  }
}

// Stages the warp's rows in `tile` (which nothing but this warp reads any more) and writes 16-byte pieces.
template <typename T, class Tile, int kBands, int kOut8>
__device__ __forceinline__ void store_staged(T* out, int64_t stride, int first_row, int row_limit, int v_dim, char* tile,
                                             const float (&o)[kBands][kOut8][4], int warp, int lane) {
  static_assert(sizeof(T) == 2);
  constexpr int kWarpRows = 16 * kBands;
  __syncwarp();  // all lanes have read Q
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = warp * kWarpRows + band * 16 + lane / 4 + 8 * i;
#pragma unroll
      for (int d = 0; d < kOut8; ++d)
        store_pair(reinterpret_cast<T*>(tile + Tile::offset(local, d) + 4 * (lane % 4)), o[band][d][2 * i], o[band][d][2 * i + 1]);
    }
  }
  __syncwarp();
  // Each step takes whole rows; lanes keep their chunk.
  constexpr int kStep = 32 / Tile::kChunks > 0 && 32 % Tile::kChunks == 0 ? 32 / Tile::kChunks : 0;
  if constexpr (kStep > 0) {
    const int row = lane / Tile::kChunks, chunk = lane % Tile::kChunks, local = warp * kWarpRows + row;
    const int rows = chunk * Tile::kVec < v_dim ? row_limit - first_row - local : 0;
    T* to = out + static_cast<int64_t>(first_row + local) * stride + chunk * Tile::kVec;
#pragma unroll
    for (int x = 0; x < kWarpRows; x += kStep) {
      if (x < rows) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + Tile::offset(local + x, chunk));
      to += kStep * stride;
    }
  } else {
    for (int x = lane; x < kWarpRows * Tile::kChunks; x += 32) {
      const int local = warp * kWarpRows + x / Tile::kChunks, chunk = x % Tile::kChunks;
      if (first_row + local < row_limit && chunk * Tile::kVec < v_dim)
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(first_row + local) * stride + chunk * Tile::kVec) =
            *reinterpret_cast<const uint4*>(tile + Tile::offset(local, chunk));
    }
  }
}

}  // namespace stof
