// The public entry points: argument checks and the choice of an instance.
#include "stof/attention.h"

#include <algorithm>
#include <cmath>

#include "instances.h"
#include "schedule.h"
#ifdef STOF_HAVE_SM90
#include "attention_sm90.h"
#endif

namespace stof {
namespace {

bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

const char* bad_tensor(const TensorView& t, int64_t element_bytes) {
  if (!t.ptr) return "a null tensor";
  if (!aligned16(t.ptr)) return "a tensor that is not 16-byte aligned";
  for (const int64_t stride : {t.stride_b, t.stride_h, t.stride_s})
    if (stride * element_bytes % 16 != 0) return "a tensor stride that is not a multiple of 16 bytes";
  if (t.stride_s < 0 || t.stride_s > INT32_MAX / 2) return "a row stride that is negative or beyond 2^30 elements";
  return nullptr;
}

template <typename Enum>
bool in_range(Enum value, Enum last) {
  return static_cast<int32_t>(value) >= 0 && static_cast<int32_t>(value) <= static_cast<int32_t>(last);
}

// What no kernel family can run.
const char* malformed(const AttentionParams& p) {
  if (!in_range(p.dtype, DType::kF32) || !in_range(p.f32_math, F32Math::kTf32) || !in_range(p.kernel, Kernel::kBlockSm90) ||
      !in_range(p.bias_kind, BiasKind::kRelative) || !in_range(p.kv_kind, KvKind::kLength) ||
      !in_range(p.masked_row, MaskedRow::kNan) || !in_range(p.mask.bitmap_order, BitmapOrder::kFragments))
    return "an enumerator out of range";
  if (p.batch <= 0 || p.heads <= 0 || p.kv_heads <= 0 || p.seq_q <= 0 || p.seq_kv <= 0) return "a size that is not positive";
  if (p.heads % p.kv_heads != 0) return "heads is not a multiple of kv_heads";
  if (p.dim <= 0 || p.dim > 256 || p.dim % 8 != 0 || p.v_dim <= 0 || p.v_dim > 256 || p.v_dim % 8 != 0)
    return "head sizes must be multiples of 8 up to 256";
  const int64_t element = p.dtype == DType::kF32 ? 4 : 2;
  for (const TensorView* t : {&p.q, &p.k, &p.v, &p.o})
    if (const char* why = bad_tensor(*t, element)) return why;
  if (!std::isfinite(p.scale)) return "scale is not finite";
  if (!std::isfinite(p.softcap) || p.softcap < 0.f) return "softcap must be finite and not negative";
  const MaskView& m = p.mask;
  if (!m.full_row_ptr || !m.full_col_idx || !m.part_row_ptr || !m.part_col_idx || !m.bitmap || !m.row_order || !m.mask_index)
    return "a null mask array";
  if (m.tile_m <= 0 || m.tile_n <= 0 || m.tile_m % 8 != 0 || m.tile_n % 8 != 0) return "mask tiles must be multiples of 8";
  if (m.n_masks <= 0 || m.rows <= 0 || m.cols <= 0 || m.n_full < 0 || m.n_part < 0) return "mask counts out of range";
  if ((m.index_b != 1 && m.index_b != p.batch) || (m.index_h != 1 && m.index_h != p.heads))
    return "mask_index must be [1 or batch, 1 or heads]";
  if (int64_t{m.rows} * m.tile_m < p.seq_q || int64_t{m.cols} * m.tile_n < p.seq_kv) return "the mask is smaller than S_q x S_kv";
  if (int64_t{m.rows} * m.tile_m > INT32_MAX - 1024 || int64_t{m.cols} * m.tile_n > INT32_MAX - 1024) return "the mask is too large";
  if (p.bias_kind != BiasKind::kNone && !p.bias) return "a null bias";
  if (p.bias_kind == BiasKind::kRelative && (p.rel_rq < p.seq_q || p.rel_len - p.rel_rq + 1 < p.seq_kv))
    return "the relative bias is shorter than S_q + S_kv - 1";
  if (p.kv_kind != KvKind::kNone && !p.kv) return "a null kv mask";
  if (p.splits < 0 || p.splits > 256) return "splits must be 1..256";
  return nullptr;
}

bool second_pass(const AttentionParams& p) { return p.masked_row == MaskedRow::kMean || p.masked_row == MaskedRow::kScores; }

bool needs_general(const AttentionParams& p) {
  return p.scale <= 0.f || p.softcap > 0.f || p.bias_kind != BiasKind::kNone || p.kv_kind == KvKind::kMask || second_pass(p);
}

const char* block_unsupported(const AttentionParams& p) {
  const MaskView& m = p.mask;
  if (m.tile_m != 64 && m.tile_m != 128) return "the block-wise kernel needs tile_m = 64 or 128";
  if (m.tile_n != 32 && m.tile_n != 64 && m.tile_n != 128) return "the block-wise kernel needs tile_n = 32, 64 or 128";
  if (p.splits > 1 && second_pass(p)) return "masked_row mean and scores need splits = 1";
  if (!find_block_instance(p)) return "no block-wise instance for these sizes";
  return nullptr;
}

const char* row_unsupported(const AttentionParams& p) {
  if (p.mask.bitmap_order != BitmapOrder::kTiles) return "the row-wise kernel reads bitmaps in tile order";
  if (p.splits > 1) return "the row-wise kernel does not split over keys";
  return nullptr;
}

}  // namespace

const BlockInstance* find_block_instance(const AttentionParams& p) {
  const int dim = std::max(p.dim, p.v_dim);
  const bool tensor_cores = p.dtype == DType::kF32 && p.f32_math != F32Math::kFfma;
  const BlockInstance* best = nullptr;
  auto search = [&](BlockInstances instances) {
    for (const BlockInstance* i = instances.first; i < instances.first + instances.count; ++i) {
      const bool fits = i->general ? p.mask.tile_m % i->rows == 0 && p.mask.tile_n % i->cols == 0
                                   : p.mask.tile_m == i->rows && p.mask.tile_n == i->cols && !needs_general(p);
      if (i->dtype != p.dtype || i->tensor_cores != tensor_cores || i->max_dim < dim || !fits) continue;
      if (!best || i->max_dim < best->max_dim || (i->max_dim == best->max_dim && best->general && !i->general)) best = i;
    }
  };
  switch (p.dtype) {
    case DType::kF16: search(block_instances_f16()); search(block_instances_general_half()); break;
    case DType::kBF16: search(block_instances_bf16()); search(block_instances_general_half()); break;
    case DType::kF32: search(block_instances_f32()); break;
  }
  return best;
}

const char* attention_unsupported(const AttentionParams& p) {
  if (const char* why = malformed(p)) return why;
  switch (p.kernel) {
    case Kernel::kRowWise: return row_unsupported(p);
    case Kernel::kBlockSm80: return block_unsupported(p);
    case Kernel::kBlockSm90:
#ifdef STOF_HAVE_SM90
      return attention_block_sm90_unsupported(p);
#else
      return "this build has no sm_90 kernels";
#endif
  }
  return "an unknown kernel";
}

size_t attention_workspace_bytes(const AttentionParams& p) {
  if (attention_unsupported(p)) return 0;
  switch (p.kernel) {
    case Kernel::kRowWise: return 0;
    case Kernel::kBlockSm80: return split_workspace_bytes(p, find_block_instance(p)->rows);
    case Kernel::kBlockSm90:
#ifdef STOF_HAVE_SM90
      return attention_block_sm90_workspace_bytes(p);
#else
      return 0;
#endif
  }
  return 0;
}

cudaError_t attention_forward(const AttentionParams& p, cudaStream_t stream) {
  if (attention_unsupported(p)) return cudaErrorInvalidValue;
  const size_t bytes = attention_workspace_bytes(p);
  if (bytes > 0 && (!p.workspace || p.workspace_bytes < bytes || reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0))
    return cudaErrorInvalidValue;
  switch (p.kernel) {
    case Kernel::kRowWise: return row_wise_forward(p, stream);
    case Kernel::kBlockSm80: return find_block_instance(p)->launch(p, stream);
    case Kernel::kBlockSm90:
#ifdef STOF_HAVE_SM90
      return attention_block_sm90(p, stream);
#else
      return cudaErrorInvalidValue;
#endif
  }
  return cudaErrorInvalidValue;
}

}  // namespace stof
