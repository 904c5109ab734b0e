// The hot instances of one 2-byte type: mask tile == kernel tile, no score modifiers.
#pragma once
#include "block_launch.cuh"
#include "engine_half.cuh"

namespace stof {

// kDim, 16-row bands a warp, columns, warps, stages, Q in registers, blocks an SM.
template <typename T, int kDim, int kBands, int kCols, int kWarps, int kStages, bool kQInRegs, int kMinBlocks>
using Exact = BlockTraits<HalfEngine<T, kDim, kCols, kBands, kQInRegs>, kDim, kBands, kCols, kWarps, kStages, kMinBlocks, false>;

template <typename T, DType kType>
BlockInstances exact_instances() {
  static constexpr BlockInstance kInstances[] = {
      block_instance<Exact<T, 32, 1, 64, 4, 2, true, 4>>(kType),
      block_instance<Exact<T, 64, 2, 32, 2, 2, false, 6>>(kType),
      block_instance<Exact<T, 64, 1, 64, 4, 2, true, 4>>(kType),
      block_instance<Exact<T, 64, 2, 64, 4, 2, true, 2>>(kType),
      block_instance<Exact<T, 64, 2, 32, 4, 2, false, 3>>(kType),
      block_instance<Exact<T, 96, 1, 64, 4, 2, true, 3>>(kType),
      block_instance<Exact<T, 128, 1, 32, 4, 2, false, 3>>(kType),
      block_instance<Exact<T, 128, 1, 64, 4, 2, true, 2>>(kType),
      block_instance<Exact<T, 128, 2, 64, 4, 2, false, 2>>(kType),
  };
  return {kInstances, int(sizeof(kInstances) / sizeof(kInstances[0]))};
}

}  // namespace stof
