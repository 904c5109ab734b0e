// Which piece of the schedule a block takes.
#pragma once
#include "schedule.h"

namespace stof {

__device__ __forceinline__ int quotient(uint32_t n, const Divisor& d) { return (__umulhi(n, d.multiplier) + n) >> d.shift; }

struct WorkItem {
  int b, h, kv_head, order, split, splits;
  int slot;  // place in the workspace of a split piece
};

__device__ __forceinline__ WorkItem work_item(const Schedule& s, int block) {
  const int group = quotient(block, s.per_group);
  const int within = block - group * static_cast<int>(s.per_group.value);
  const int first = group * s.group;
  const bool whole = first + s.group <= s.batch_heads;
  const int item = whole ? quotient(within, s.in_group) : quotient(within, s.in_last_group);
  const int bh = first + within - item * static_cast<int>(whole ? s.in_group.value : s.in_last_group.value);
  WorkItem w;
  w.b = quotient(bh, s.by_heads);
  w.h = bh - w.b * static_cast<int>(s.by_heads.value);
  w.kv_head = quotient(w.h, s.heads_per_kv);
  const int split_items = s.split_orders * s.splits;
  const bool is_split = item < split_items;
  const int split_order = quotient(item, s.by_splits);
  w.order = is_split ? split_order : item - split_items + s.split_orders;
  w.split = is_split ? item - split_order * s.splits : 0;
  w.splits = is_split ? s.splits : 1;
  w.slot = (bh * s.split_orders + w.order) * s.splits + w.split;
  return w;
}

}  // namespace stof
