// Instances and launch of the row-wise kernel.
#include "instances.h"
#include "row_kernel.cuh"

namespace stof {
namespace {

template <typename T, int kLanes>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
  const int per_head = (p.seq_q + kRowWarps - 1) / kRowWarps;
  const int64_t blocks = int64_t{per_head} * p.batch * p.heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const bool plain = p.softcap == 0.f && p.bias_kind == BiasKind::kNone && p.kv_kind != KvKind::kMask &&
                     p.masked_row != MaskedRow::kMean && p.masked_row != MaskedRow::kScores;
  const auto kernel = plain ? row_attention<T, kLanes, true> : row_attention<T, kLanes, false>;
  kernel<<<static_cast<unsigned>(blocks), 32 * kRowWarps, 0, stream>>>(p, per_head);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_for_dim(const AttentionParams& p, cudaStream_t stream) {
  const int dim = p.dim > p.v_dim ? p.dim : p.v_dim;
  if (dim <= 32) return launch<T, 4>(p, stream);
  if (dim <= 64) return launch<T, 8>(p, stream);
  if (dim <= 128) return launch<T, 16>(p, stream);
  return launch<T, 32>(p, stream);
}

}  // namespace

cudaError_t row_wise_forward(const AttentionParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kF16: return launch_for_dim<__half>(p, stream);
    case DType::kBF16: return launch_for_dim<__nv_bfloat16>(p, stream);
    default: return launch_for_dim<float>(p, stream);
  }
}

}  // namespace stof
