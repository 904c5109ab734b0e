// The public entry points of fused regions: argument checks and the choice of a variant.
#include "stof/fused.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "fused/cublaslt.h"
#include "fused/variants.h"

namespace stof {
namespace {

// What a launch takes: `launch`, and for each wave of tiles (of clusters of tiles) `steps` times step + tile. Nanoseconds.
struct Cost {
  int32_t blocks;  // of a cluster
  int32_t split;   // of them, how many share the steps of one tile
  int32_t launch, step, tile, activation;
};

#ifdef STOF_HAVE_SM90
#define STOF_CONFIG(name, bands, columns, stages, cluster, ping_pong, gated, buffers, ...) \
  {name, (bands) * 64 * ((ping_pong) ? 1 : 2), (columns) / ((gated) ? 2 : 1), 64, stages, cluster, 1, 90},
#define STOF_SPLIT_CONFIG(name, ...) {name, 128, 64, 64, 6, 1, 1, 90},
#define STOF_NORM_CONFIG(name, bands, columns, stages, ...) {name, (bands) * 64, columns, 64, stages, 1, 8, 90},
#define STOF_COST(name, bands, columns, stages, cluster, ping_pong, gated, buffers, ...) {cluster, 1, __VA_ARGS__},
#define STOF_SPLIT_COST(name, split, ...) {split, split, __VA_ARGS__},
#define STOF_NORM_COST(name, bands, columns, stages, buffers, ...) {0, 1, __VA_ARGS__, 0},
constexpr FusedConfig kGemmConfigs[] = {STOF_GEMM_VARIANTS(STOF_CONFIG) STOF_SPLIT_VARIANTS(STOF_SPLIT_CONFIG)};
constexpr FusedConfig kGatedConfigs[] = {STOF_GATED_VARIANTS(STOF_CONFIG)};
constexpr FusedConfig kNormConfigs[] = {STOF_NORM_VARIANTS(STOF_NORM_CONFIG)};
constexpr Cost kGemmCosts[] = {STOF_GEMM_VARIANTS(STOF_COST) STOF_SPLIT_VARIANTS(STOF_SPLIT_COST)};
constexpr Cost kGatedCosts[] = {STOF_GATED_VARIANTS(STOF_COST)};
constexpr Cost kNormCosts[] = {STOF_NORM_VARIANTS(STOF_NORM_COST)};
#undef STOF_CONFIG
#undef STOF_SPLIT_CONFIG
#undef STOF_NORM_CONFIG
#undef STOF_COST
#undef STOF_SPLIT_COST
#undef STOF_NORM_COST
#else
constexpr Cost kGemmCosts[1] = {}, kGatedCosts[1] = {}, kNormCosts[1] = {};
#endif

bool misaligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; }

const char* bad_matrix(const void* data, int64_t stride, int64_t columns) {
  if (!data) return "a null matrix";
  if (misaligned(data)) return "a matrix that is not 16-byte aligned";
  if (stride % 8 != 0) return "a row stride that is not a multiple of 16 bytes";
  if (stride < columns || stride > std::numeric_limits<int32_t>::max()) return "a row stride that is shorter than its row or too long";
  return nullptr;
}

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

const Cost* costs(FusedTemplate id) {
  return id == FusedTemplate::kGemmEpilogue ? kGemmCosts : id == FusedTemplate::kGatedMlp ? kGatedCosts : kNormCosts;
}

// Whether the blocks of a cluster can hold a row of the output.
bool fits(const FusedParams& p, const FusedConfig& c) {
  return p.template_id != FusedTemplate::kGemmNorm || ceiling(p.n, c.tile_n) <= c.cluster_n;
}

// Clusters of `blocks` that run at a time. They do not cross groups of multiprocessors, which have 16 or 18 on Hopper: what a larger
// cluster leaves of a group stays idle.
int64_t clusters_at_a_time(int32_t sms, int64_t blocks) {
  constexpr int32_t kGroup = 16;
  if (blocks < 3) return std::max<int64_t>(sms / blocks, 1);
  return std::max<int64_t>(sms / kGroup * (kGroup / blocks), 1);
}

}  // namespace

int32_t fused_config_count(FusedTemplate template_id) {
#ifdef STOF_HAVE_SM90
  if (template_id == FusedTemplate::kGemmEpilogue) return static_cast<int32_t>(std::size(kGemmConfigs));
  if (template_id == FusedTemplate::kGatedMlp) return static_cast<int32_t>(std::size(kGatedConfigs));
  if (template_id == FusedTemplate::kGemmNorm) return static_cast<int32_t>(std::size(kNormConfigs));
#endif
  static_cast<void>(template_id);
  return 0;
}

const FusedConfig* fused_config(FusedTemplate template_id, int32_t index) {
  if (index < 0 || index >= fused_config_count(template_id)) return nullptr;
#ifdef STOF_HAVE_SM90
  switch (template_id) {
    case FusedTemplate::kGemmEpilogue: return kGemmConfigs + index;
    case FusedTemplate::kGatedMlp: return kGatedConfigs + index;
    case FusedTemplate::kGemmNorm: return kNormConfigs + index;
  }
  return nullptr;
#else
  return nullptr;
#endif
}

int32_t fused_auto_config(const FusedParams& p, int32_t sms) {
  const bool costly = p.rotation || (p.activation != Activation::kNone && p.activation != Activation::kRelu);
  int32_t best = -1;
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (int32_t i = 0; i < fused_config_count(p.template_id); ++i) {
    const FusedConfig& c = *fused_config(p.template_id, i);
    if (!fits(p, c)) continue;
    const Cost& cost = costs(p.template_id)[i];
    const bool norm = p.template_id == FusedTemplate::kGemmNorm;
    const int64_t blocks = norm ? ceiling(p.n, c.tile_n) : cost.blocks;
    const int64_t tiles = ceiling(p.m, int64_t{c.tile_m} * c.cluster_m) * (norm ? 1 : ceiling(p.n, c.tile_n));
    const int64_t waves = ceiling(tiles, norm ? clusters_at_a_time(sms, blocks) : std::max(sms / cost.blocks, 1));
    const int64_t steps = ceiling(ceiling(p.k, 64), cost.split);
    const int64_t total = cost.launch + waves * (steps * cost.step + cost.tile + (costly ? cost.activation : 0));
    if (total < best_cost) {
      best = i;
      best_cost = total;
    }
  }
  return best;
}

size_t fused_workspace_bytes(const FusedParams& p) { return p.config == kCublasLtConfig ? kCublasLtWorkspace : 0; }

const char* fused_unsupported(const FusedParams& p) {
  const bool gated = p.template_id == FusedTemplate::kGatedMlp, norm = p.template_id == FusedTemplate::kGemmNorm;
  if (!gated && !norm && p.template_id != FusedTemplate::kGemmEpilogue) return "an unknown template";
  const bool library = p.config == kCublasLtConfig;
  if (!library && fused_config_count(p.template_id) == 0) return "this build has no sm_90 kernels";
  if (!library && p.config != kAutoConfig && !fused_config(p.template_id, p.config)) return "an unknown configuration";
  if (p.dtype != DType::kF16 && p.dtype != DType::kBF16) return "fused regions take fp16 and bf16 only";
  if (static_cast<int32_t>(p.activation) < 0 || p.activation > Activation::kSilu) return "an unknown activation";
  if (p.m < 1 || p.n < 1 || p.k < 1) return "a size that is not positive";
  if (p.n % 8 != 0 || p.k % 8 != 0) return "n or k is not a multiple of 8";
  // Tiles are counted, and rows reached, in 32 bits.
  if (ceiling(p.m, 64) * ceiling(p.n, 64) > std::numeric_limits<int32_t>::max() / 2 ||
      p.m > std::numeric_limits<int32_t>::max() - 1024 || p.n > std::numeric_limits<int32_t>::max() - 1024 ||
      p.k > std::numeric_limits<int32_t>::max() - 1024)
    return "a size beyond what 32-bit tile indices reach";
  if (!gated && (p.b2 || p.bias2)) return "a second factor outside a gated region";
  if (gated && p.residual) return "a gated region with a residual";
  if (const char* why = bad_matrix(p.a, p.stride_a, p.k)) return why;
  if (const char* why = bad_matrix(p.b, p.stride_b, p.n)) return why;
  if (const char* why = bad_matrix(p.out, p.stride_out, p.n)) return why;
  if (gated)
    if (const char* why = bad_matrix(p.b2, p.stride_b2, p.n)) return why;
  if (p.residual)
    if (const char* why = bad_matrix(p.residual, p.stride_residual, p.n)) return why;
  if (misaligned(p.bias) || misaligned(p.bias2)) return "a bias that is not 16-byte aligned";
  if (p.rotation) {
    if (gated || norm || p.residual || p.activation != Activation::kNone) return "a rotation beside a gate, a norm, an activation or a residual";
    if (misaligned(p.rotation)) return "a rotation that is not 16-byte aligned";
    if (p.head_dim < 8 || p.head_dim % 8 != 0 || p.positions < 1) return "a rotation without positions or of heads that are no multiple of 8";
    if (p.rotated_columns < 1 || p.rotated_columns > p.n || p.rotated_columns % p.head_dim != 0)
      return "rotated columns that are no whole heads of the output";
  } else if (p.rotated_columns || p.head_dim || p.positions) {
    return "rotated columns without a rotation";
  }
  if (norm) {
    if (p.norm != Norm::kLayer && p.norm != Norm::kRms) return "an unknown norm";
    if (p.activation != Activation::kNone) return "an activation ahead of a norm";
    if (!(p.epsilon >= 0.0f && p.epsilon < std::numeric_limits<float>::infinity())) return "an epsilon that is negative or not finite";
    if (misaligned(p.scale) || misaligned(p.shift)) return "a scale or shift that is not 16-byte aligned";
    if (p.sum)
      if (const char* why = bad_matrix(p.sum, p.stride_sum, p.n)) return why;
    if (p.sum == p.out) return "the sum in the place of the output";
    if (p.residual && p.residual == p.sum && p.stride_residual != p.stride_sum) return "a residual in place with another row stride";
    bool found = false;
    for (int32_t i = 0; i < fused_config_count(p.template_id); ++i)
      found |= (p.config == kAutoConfig || p.config == i) && fits(p, *fused_config(p.template_id, i));
    if (!found) return "rows too long for the norm's clusters of blocks";
  } else if (p.scale || p.shift || p.sum) {
    return "a scale, shift or sum without a norm";
  }
  if (p.residual == p.out && p.stride_residual != p.stride_out) return "a residual in place with another row stride";
  return library ? cublaslt_lacks(p) : nullptr;
}

cudaError_t fused_launch(const FusedParams& p, cudaStream_t stream) {
  if (fused_unsupported(p)) return cudaErrorInvalidValue;
  if (p.config == kCublasLtConfig) {
    return p.workspace_bytes < kCublasLtWorkspace ? cudaErrorInvalidValue : cublaslt_launch(p, stream);
  }
#ifdef STOF_HAVE_SM90
  int32_t config = p.config;
  if (config == kAutoConfig) {
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    config = fused_auto_config(p, sms);
  }
  if (p.template_id == FusedTemplate::kGemmNorm) {
    return p.dtype == DType::kF16 ? gemm_norm_sm90_f16(p, config, stream) : gemm_norm_sm90_bf16(p, config, stream);
  }
  return p.dtype == DType::kF16 ? gemm_sm90_f16(p, config, stream) : gemm_sm90_bf16(p, config, stream);
#else
  static_cast<void>(stream);
  return cudaErrorInvalidValue;
#endif
}

}  // namespace stof
