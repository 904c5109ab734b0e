// fp32 instances (all of the general form): exact FFMA, and tf32 on tensor cores once or three times.
#include "block_launch.cuh"
#include "engine_f32.cuh"

namespace stof {
namespace {

template <int kDim, int kWarps, int kStages, int kMinBlocks>
using Ffma = BlockTraits<FfmaEngine<kDim, 32>, kDim, 1, 32, kWarps, kStages, kMinBlocks, true>;
template <int kDim, int kWarps, int kStages, int kMinBlocks>
using Tf32 = BlockTraits<Tf32Engine<kDim, 32>, kDim, 1, 32, kWarps, kStages, kMinBlocks, true>;

// D = 256: half the rows and one stage keep a block within the 99 KB of sm_86 and sm_89.
constexpr BlockInstance kInstances[] = {
    block_instance<Ffma<64, 4, 2, 3>>(DType::kF32),        block_instance<Ffma<128, 4, 2, 2>>(DType::kF32),
    block_instance<Ffma<256, 2, 1, 2>>(DType::kF32),       block_instance<Tf32<64, 4, 2, 3>>(DType::kF32, true),
    block_instance<Tf32<128, 4, 2, 2>>(DType::kF32, true), block_instance<Tf32<256, 2, 1, 2>>(DType::kF32, true),
};

}  // namespace

BlockInstances block_instances_f32() { return {kInstances, int(sizeof(kInstances) / sizeof(kInstances[0]))}; }

}  // namespace stof
