#include "region_core.h"

#include "cubin_region.h"
#include "fail.h"
#include "gemm_region.h"

namespace stof {

std::unique_ptr<RegionCore> make_region(const RegionConfig& config, char* error, size_t error_size) {
  switch (config.template_id) {
    case RegionTemplate::kGemmEpilogue:
    case RegionTemplate::kGatedMlp:
    case RegionTemplate::kGemmNorm: return make_gemm_region(config, error, error_size);
    case RegionTemplate::kCubin: return make_cubin_region(config, error, error_size);
  }
  fail(error, error_size, "this library has no regions of this template");
  return nullptr;
}

}  // namespace stof
