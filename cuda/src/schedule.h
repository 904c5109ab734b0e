// How the work is cut into blocks. First the rows that the parameters name as the longest, of all heads, whether split or not:
// started late, one of them alone would be the tail. Then the others, longest first within a group of heads whose K and V
// fit in L2 together, group after group.
#pragma once
#include "stof/attention.h"

namespace stof {

// Division of n < 2^31 by a number known on the host: five dependent divisions would delay every block's first load.
struct Divisor {
  uint32_t value, multiplier, shift;
};
Divisor make_divisor(int32_t value);

struct Schedule {
  int32_t batch_heads;     // B * Hq
  int32_t group;           // heads that run interleaved
  int32_t long_orders;     // leading entries of row_order (times the kernel rows of a mask row tile) that come first
  int32_t other_orders;
  int32_t splits;          // pieces of each of the long ones' lists
  Divisor by_batch_heads;
  Divisor per_group;       // group * other_orders
  Divisor in_group;        // group
  Divisor in_last_group;   // heads in the last group
  Divisor by_heads, by_splits, heads_per_kv;

  int64_t blocks() const { return int64_t{batch_heads} * (int64_t{long_orders} * splits + other_orders); }
};

// `rows_per_tile` kernel rows make one mask row tile.
Schedule make_schedule(const AttentionParams& p, int rows_per_tile);
// Bytes of partial results: per slot, tile_rows rows of v_dim fp32 and (max, sum).
size_t split_workspace_bytes(const AttentionParams& p, int kernel_rows);
// Joins the partial results of the split rows. `kernel_rows` rows a slot.
cudaError_t launch_combine(const AttentionParams& p, const Schedule& s, int kernel_rows, cudaStream_t stream);

}  // namespace stof
