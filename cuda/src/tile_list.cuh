// The mask side of one row tile: which column tiles it visits. Device arrays are not trusted: every index taken from
// them is clamped, and columns are bounds-checked where keys are loaded.
#pragma once
#include "stof/attention.h"

namespace stof {

__device__ __forceinline__ int clamp_int(int x, int low, int high) { return min(max(x, low), high); }

__device__ __forceinline__ int mask_of(const MaskView& m, int b, int h) {
  if (m.n_masks == 1) return 0;  // one load less in the chain that precedes the first key
  const int index = (m.index_b > 1 ? b : 0) * m.index_h + (m.index_h > 1 ? h : 0);
  return clamp_int(__ldg(m.mask_index + index), 0, m.n_masks - 1);
}

__device__ __forceinline__ int ordered_row(const MaskView& m, int mask, int order) {
  return clamp_int(__ldg(m.row_order + static_cast<int64_t>(mask) * m.rows + order), 0, m.rows - 1);
}

// How many of the ascending `columns[0..count)` are below `limit`: a 32-ary search, all lanes of the warp together.
__device__ __forceinline__ int count_below(const int32_t* columns, int count, int limit) {
  const int lane = threadIdx.x % 32;
  int begin = 0;
  while (count > 0) {
    const int step = (count + 31) / 32;
    const int probe = lane * step;
    const bool below = probe < count && __ldg(columns + begin + probe) < limit;
    const int hits = __popc(__ballot_sync(~0u, below));
    if (hits == 0) return begin;
    if (step == 1) return begin + hits;
    const int skipped = (hits - 1) * step + 1;
    begin += skipped;
    count = min(step - 1, count - skipped);
  }
  return begin;
}

// Entries [0, full) are full tiles, [full, full + part) part tiles. Columns at or past `column_limit` are cut off.
struct TileList {
  int full_first, part_first;  // of this row in full_col_idx; in part_col_idx and bitmap
  int full, part;

  __device__ TileList(const MaskView& m, int mask, int row, int column_limit) {
    const int64_t at = static_cast<int64_t>(mask) * (m.rows + 1) + row;
    full_first = clamp_int(__ldg(m.full_row_ptr + at), 0, m.n_full);
    full = clamp_int(__ldg(m.full_row_ptr + at + 1), full_first, m.n_full) - full_first;
    part_first = clamp_int(__ldg(m.part_row_ptr + at), 0, m.n_part);
    part = clamp_int(__ldg(m.part_row_ptr + at + 1), part_first, m.n_part) - part_first;
    if (column_limit < m.cols) {
      full = count_below(m.full_col_idx + full_first, full, column_limit);
      part = count_below(m.part_col_idx + part_first, part, column_limit);
    }
  }
  __device__ int count() const { return full + part; }
  __device__ int column(const MaskView& m, int entry) const {
    return __ldg(entry < full ? m.full_col_idx + full_first + entry : m.part_col_idx + part_first + (entry - full));
  }
};

}  // namespace stof
