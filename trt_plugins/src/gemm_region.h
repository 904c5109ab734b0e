// The GEMM templates of StofFusedRegion (stof/fused.h).
#pragma once
#include "region_core.h"

namespace stof {

// Null, with the reason in `error`, where this build lacks the template or its variant. Throws std::bad_alloc.
std::unique_ptr<RegionCore> make_gemm_region(const RegionConfig& config, char* error, size_t error_size);

}  // namespace stof
