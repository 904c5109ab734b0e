// The template `cubin` of StofFusedRegion: what a program says.
#pragma once
#include "region_core.h"

namespace stof {

// Null, with the reason in `error`, where the program is none. Throws std::bad_alloc.
std::unique_ptr<RegionCore> make_cubin_region(const RegionConfig& config, char* error, size_t error_size);

}  // namespace stof
