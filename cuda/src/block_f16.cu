#include "block_exact.cuh"

namespace stof {

BlockInstances block_instances_f16() { return exact_instances<__half, DType::kF16>(); }

}  // namespace stof
