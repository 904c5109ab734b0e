// The compiled kernels of each family, as a table the dispatcher searches. One translation unit a group of instances.
#pragma once
#include "stof/attention.h"

namespace stof {

struct BlockInstance {
  DType dtype;
  int32_t max_dim;           // head sizes (of K and of V) up to this
  int32_t rows, cols;        // the kernel's tile
  bool general;              // false: mask tile == kernel tile and no score modifiers
  bool tensor_cores;         // fp32 only: tf32 instead of FFMA
  cudaError_t (*launch)(const AttentionParams&, cudaStream_t);
};

struct BlockInstances {
  const BlockInstance* first;
  int count;
};

// Each defined in its own file; the smaller kernel comes first in each group.
BlockInstances block_instances_f16();
BlockInstances block_instances_bf16();
BlockInstances block_instances_general_half();
BlockInstances block_instances_f32();

// The instance that runs `p`, or null.
const BlockInstance* find_block_instance(const AttentionParams& p);

cudaError_t row_wise_forward(const AttentionParams& p, cudaStream_t stream);

}  // namespace stof
