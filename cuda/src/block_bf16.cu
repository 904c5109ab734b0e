#include "block_exact.cuh"

namespace stof {

BlockInstances block_instances_bf16() { return exact_instances<__nv_bfloat16, DType::kBF16>(); }

}  // namespace stof
