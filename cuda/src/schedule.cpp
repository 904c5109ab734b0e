// Grid order and workspace sizes: pure arithmetic on the parameters.
#include "schedule.h"

#include <algorithm>

namespace stof {
namespace {

// K and V of the heads that run side by side should stay in L2 together with what streams past. Larger groups balance better
// (the longest rows of more heads come first), so most of the cache is worth taking.
int64_t l2_budget() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device) != cudaSuccess) {
    cudaGetLastError();  // no GPU: sizes alone are asked for
    bytes = 0;
  }
  return std::max<int64_t>(int64_t{4} << 20, int64_t{bytes} * 3 / 4);
}

}  // namespace

Divisor make_divisor(int32_t value) {
  Divisor d{};
  d.value = static_cast<uint32_t>(value);
  while ((uint64_t{1} << d.shift) < d.value) ++d.shift;
  d.multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << d.shift) - d.value) / d.value + 1);
  return d;
}

Schedule make_schedule(const AttentionParams& p, int rows_per_tile) {
  Schedule s{};
  s.batch_heads = p.batch * p.heads;
  const int64_t element = p.dtype == DType::kF32 ? 4 : 2;
  const int64_t kv_bytes = std::max<int64_t>(1, int64_t{p.seq_kv} * (p.dim + p.v_dim) * element);
  const int64_t most = std::max<int64_t>(1, l2_budget() / kv_bytes) * (p.heads / p.kv_heads);
  const int64_t groups = (s.batch_heads + most - 1) / most;  // of equal size: a small last one would be a tail
  s.group = static_cast<int32_t>((s.batch_heads + groups - 1) / groups);
  s.splits = std::max(1, p.splits);
  const int32_t rows = p.mask.rows;
  const int32_t named = p.mask.split_rows > 0 ? std::min(p.mask.split_rows, rows) : s.splits > 1 ? rows : 0;
  s.long_orders = named * rows_per_tile;
  s.other_orders = (rows - named) * rows_per_tile;
  s.by_batch_heads = make_divisor(s.batch_heads);
  s.per_group = make_divisor(std::max(1, s.group * s.other_orders));
  s.in_group = make_divisor(s.group);
  const int32_t rest = s.batch_heads % s.group;
  s.in_last_group = make_divisor(rest == 0 ? s.group : rest);
  s.by_heads = make_divisor(p.heads);
  s.by_splits = make_divisor(s.splits);
  s.heads_per_kv = make_divisor(p.heads / p.kv_heads);
  return s;
}

size_t split_workspace_bytes(const AttentionParams& p, int kernel_rows) {
  if (p.splits <= 1) return 0;
  const Schedule s = make_schedule(p, p.mask.tile_m / kernel_rows);
  return size_t{4} * s.batch_heads * s.long_orders * s.splits * kernel_rows * (p.v_dim + 2);
}

}  // namespace stof
