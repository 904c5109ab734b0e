// Which piece of the schedule a block takes.
#pragma once
#include "schedule.h"

namespace stof {

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

}  // namespace stof
