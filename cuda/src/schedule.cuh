// Which piece of work a block takes. Blocks run longest row first within a group of heads whose K and V fit in L2
// together, group after group.
#pragma once
#include "stof/attention.h"

namespace stof {

struct Schedule {
  int32_t batch_heads;   // B * Hq
  int32_t group;         // heads that run interleaved
  int32_t items;         // pieces of work of one head
  int32_t orders;        // entries of row_order times the kernel rows of one mask row tile
  int32_t split_orders;  // of these the first, whose lists are split
  int32_t splits;
};

struct WorkItem {
  int b, h, order, split, splits;
  int slot;  // place in the workspace of a split piece
};

__device__ __forceinline__ WorkItem work_item(const Schedule& s, int heads, int block) {
  const int per_group = s.group * s.items;
  const int first = block / per_group * s.group;
  const int size = min(s.group, s.batch_heads - first);
  const int within = block % per_group;
  const int item = within / size;
  const int bh = first + within % size;
  const int split_items = s.split_orders * s.splits;
  WorkItem w;
  w.b = bh / heads;
  w.h = bh % heads;
  const bool is_split = item < split_items;
  w.order = is_split ? item / s.splits : item - split_items + s.split_orders;
  w.split = is_split ? item % s.splits : 0;
  w.splits = is_split ? s.splits : 1;
  w.slot = (bh * s.split_orders + w.order) * s.splits + w.split;
  return w;
}

// Host side. `rows_per_tile` kernel rows make one mask row tile.
Schedule make_schedule(const AttentionParams& p, int rows_per_tile);
// Bytes of partial results: per slot, tile_rows rows of v_dim fp32 and (max, sum).
size_t split_workspace_bytes(const AttentionParams& p, int kernel_rows);
// Joins the partial results of the split rows. `kernel_rows` rows a slot.
cudaError_t launch_combine(const AttentionParams& p, const Schedule& s, int kernel_rows, cudaStream_t stream);

}  // namespace stof
