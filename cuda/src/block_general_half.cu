// General fp16 and bf16 instances: bias, softcap, run-time key masks, every masked_row, D != Dv, any mask tile.
#include "block_launch.cuh"
#include "engine_half.cuh"

namespace stof {
namespace {

template <typename T, int kDim, int kMinBlocks>
using General = BlockTraits<HalfEngine<T, kDim, 32, 1, kDim <= 64>, kDim, 1, 32, 4, 2, kMinBlocks, true>;

constexpr BlockInstance kInstances[] = {
    block_instance<General<__half, 64, 4>>(DType::kF16),
    block_instance<General<__half, 128, 3>>(DType::kF16),
    block_instance<General<__half, 256, 2>>(DType::kF16),
    block_instance<General<__nv_bfloat16, 64, 4>>(DType::kBF16),
    block_instance<General<__nv_bfloat16, 128, 3>>(DType::kBF16),
    block_instance<General<__nv_bfloat16, 256, 2>>(DType::kBF16),
};

}  // namespace

BlockInstances block_instances_general_half() { return {kInstances, int(sizeof(kInstances) / sizeof(kInstances[0]))}; }

}  // namespace stof
