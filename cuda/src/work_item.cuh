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
  WorkItem w;
  int bh;
  const int long_blocks = s.batch_heads * s.long_orders * s.splits;
  if (block < long_blocks) {
    const int item = quotient(block, s.by_batch_heads);
    bh = block - item * s.batch_heads;
    w.order = quotient(item, s.by_splits);
    w.split = item - w.order * s.splits;
    w.splits = s.splits;
  } else {
    const int other = block - long_blocks, group = quotient(other, s.per_group);
    const int within = other - group * static_cast<int>(s.per_group.value), first = group * s.group;
    const bool whole = first + s.group <= s.batch_heads;
    const int item = whole ? quotient(within, s.in_group) : quotient(within, s.in_last_group);
    bh = first + within - item * static_cast<int>(whole ? s.in_group.value : s.in_last_group.value);
    w.order = s.long_orders + item;
    w.split = 0;
    w.splits = 1;
  }
  w.b = quotient(bh, s.by_heads);
  w.h = bh - w.b * static_cast<int>(s.by_heads.value);
  w.kv_head = quotient(w.h, s.heads_per_kv);
  w.slot = (bh * s.long_orders + w.order) * s.splits + w.split;
  return w;
}

}  // namespace stof
