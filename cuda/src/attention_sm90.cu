// Host side of the Hopper kernel: what it supports, its tensor maps, which instance runs, and the launch.
#include "attention_sm90.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_sm90.cuh"
#include "sm90/tensor_map.h"

namespace stof {
namespace {

using sm90::Args;
using sm90::encode_tiled;

constexpr int64_t kLongList = 24;  // tiles a group on average from which sums by addition pay: causal at S = 4096, not BigBird's 16
constexpr int64_t kCacheBytes = int64_t{24} << 20;  // K and V of the heads in flight; about half of the L2

bool make_map(CUtensorMap* map, const AttentionParams& p, const TensorView& view, int dim, int seq, int heads, int rows) {
  const cuuint64_t sizes[4] = {cuuint64_t(dim), cuuint64_t(seq), cuuint64_t(heads), cuuint64_t(p.batch)};
  // A stride along an axis of one element never matters, but the encoder checks it.
  const int64_t stride_s = seq > 1 ? view.stride_s : 8, stride_h = heads > 1 ? view.stride_h : 8,
                stride_b = p.batch > 1 ? view.stride_b : 8;
  const cuuint64_t strides[3] = {cuuint64_t(2 * stride_s), cuuint64_t(2 * stride_h), cuuint64_t(2 * stride_b)};
  const cuuint32_t box[4] = {sm90::kColumns, cuuint32_t(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = p.dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tiled()(map, type, 4, view.ptr, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class C>
cudaError_t launch(const Args& args, int blocks, cudaStream_t stream) {
  const auto kernel = sm90::attention_block_sm90_kernel<C>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, C::kThreads, C::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

// Whether a mask's tiles have an instance for the larger head size: two bands with keys by 64; three for small heads; keys by 128 for
// middle ones.
constexpr bool has_instance(int dim, int rows, int keys) {
  const int bands = rows % sm90::kBand == 0 ? rows / sm90::kBand : 0;
  return (bands == 2 && keys == 64) || (bands == 3 && keys == 64 && dim <= 64) ||
         (bands == 2 && keys == 128 && dim > 64 && dim <= 128);
}

template <class Element, int kDim>
cudaError_t launch_dim(const Args& args, const MaskView& mask, int blocks, cudaStream_t stream) {
  if constexpr (has_instance(kDim, 192, 64)) {
    if (mask.tile_m == 192) {
      const int64_t listed = int64_t{mask.n_full} + mask.n_part, groups = int64_t{mask.rows} * mask.n_masks;
      return listed >= kLongList * groups ? launch<sm90::Config<Element, kDim, 3, 64, true>>(args, blocks, stream)
                                          : launch<sm90::Config<Element, kDim, 3, 64, false>>(args, blocks, stream);
    }
  }
  if constexpr (has_instance(kDim, 128, 128)) {
    if (mask.tile_n == 128) return launch<sm90::Config<Element, kDim, 2, 128>>(args, blocks, stream);
  }
  constexpr bool kLongLists = kDim <= 192;  // the largest head size has no registers for the longer loop
  return launch<sm90::Config<Element, kDim, 2, 64, kLongLists>>(args, blocks, stream);
}

template <class Element>
cudaError_t launch_type(const Args& args, const MaskView& mask, int dim, int blocks, cudaStream_t stream) {
  if (dim <= 32) return launch_dim<Element, 32>(args, mask, blocks, stream);
  if (dim <= 64) return launch_dim<Element, 64>(args, mask, blocks, stream);
  if (dim <= 96) return launch_dim<Element, 96>(args, mask, blocks, stream);
  if (dim <= 128) return launch_dim<Element, 128>(args, mask, blocks, stream);
  if (dim <= 192) return launch_dim<Element, 192>(args, mask, blocks, stream);
  return launch_dim<Element, 256>(args, mask, blocks, stream);
}

bool aligned(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.ptr) % 16 == 0 && view.stride_b % 8 == 0 && view.stride_h % 8 == 0 &&
         view.stride_s % 8 == 0;
}

bool positive_strides(const TensorView& view, const AttentionParams& p, int heads, int seq) {
  return (p.batch == 1 || view.stride_b > 0) && (heads == 1 || view.stride_h > 0) && (seq == 1 || view.stride_s > 0);
}

}  // namespace

const char* attention_block_sm90_unsupported(const AttentionParams& p) {
  if (p.dtype == DType::kF32) return "the Hopper kernel takes fp16 and bf16 only";
  if (p.bias_kind != BiasKind::kNone) return "the Hopper kernel takes no bias";
  if (p.kv_kind == KvKind::kMask) return "the Hopper kernel takes no run-time key mask, only lengths";
  if (p.softcap != 0.0f) return "the Hopper kernel has no softcap";
  if (!(p.scale > 0.0f)) return "the Hopper kernel needs a positive scale";
  if (p.masked_row != MaskedRow::kZero && p.masked_row != MaskedRow::kNan) {
    return "the Hopper kernel yields zero or NaN for rows without keys";
  }
  if (p.dim < 8 || p.dim > 256 || p.dim % 8 != 0 || p.v_dim < 8 || p.v_dim > 256 || p.v_dim % 8 != 0) {
    return "the Hopper kernel takes head sizes up to 256 that are multiples of 8";
  }
  if (!has_instance(std::max(p.dim, p.v_dim), p.mask.tile_m, p.mask.tile_n)) {
    return "the Hopper kernel takes masks lowered to groups of two bands of 64 rows and 64 keys a tile, of three for head sizes up to "
           "64, or of two and 128 keys for head sizes from 72 to 128";
  }
  if (p.mask.split_rows < 0 || p.mask.split_rows > p.mask.rows) return "split_rows is out of range";
  if (p.batch < 1 || p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0 || p.seq_q < 1 || p.seq_kv < 1) {
    return "sizes must be positive, and heads a multiple of kv_heads";
  }
  const int64_t items = int64_t{p.batch} * p.heads * p.mask.rows;
  if (items > std::numeric_limits<int32_t>::max() / 2) return "too many row groups";
  for (const TensorView* view : {&p.q, &p.k, &p.v, &p.o}) {
    const bool query = view == &p.q || view == &p.o;
    if (!aligned(*view)) return "the Hopper kernel needs pointers and strides aligned to 16 bytes";
    if (!positive_strides(*view, p, query ? p.heads : p.kv_heads, query ? p.seq_q : p.seq_kv)) {
      return "the Hopper kernel needs positive strides";
    }
  }
  return nullptr;
}

size_t attention_block_sm90_workspace_bytes(const AttentionParams&) { return 256; }

cudaError_t attention_block_sm90(const AttentionParams& p, cudaStream_t stream) {
  if (attention_block_sm90_unsupported(p) != nullptr) return cudaErrorInvalidValue;
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  Args args;
  if (!make_map(&args.q, p, p.q, p.dim, p.seq_q, p.heads, sm90::kBand) ||
      !make_map(&args.k, p, p.k, p.dim, p.seq_kv, p.kv_heads, p.mask.tile_n) ||
      !make_map(&args.v, p, p.v, p.v_dim, p.seq_kv, p.kv_heads, p.mask.tile_n) ||
      !make_map(&args.o, p, p.o, p.v_dim, p.seq_q, p.heads, 16)) {
    return cudaErrorInvalidValue;
  }
  int device, multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const MaskView& m = p.mask;
  const int dim = std::max(p.dim, p.v_dim), warpgroups = m.tile_m / sm90::kBand;
  args.full_row_ptr = m.full_row_ptr;
  args.full_col_idx = m.full_col_idx;
  args.part_row_ptr = m.part_row_ptr;
  args.part_col_idx = m.part_col_idx;
  args.row_order = m.row_order;
  args.mask_index = m.mask_index;
  args.bitmap = reinterpret_cast<const uint32_t*>(m.bitmap);
  args.index_b = m.index_b;
  args.index_h = m.index_h;
  args.n_masks = m.n_masks;
  args.groups = m.rows;
  args.n_full = m.n_full;
  args.n_part = m.n_part;
  args.batch = p.batch;
  args.heads = p.heads;
  args.heads_per_kv = p.heads / p.kv_heads;
  args.seq_q = p.seq_q;
  args.seq_kv = p.seq_kv;
  args.items = p.batch * p.heads * m.rows;
  const int64_t bytes_per_head = int64_t{2} * p.seq_kv * (p.dim + p.v_dim);
  const int64_t kv_heads = std::max<int64_t>(1, kCacheBytes / bytes_per_head);
  args.heads_per_chunk = static_cast<int>(std::min<int64_t>(kv_heads * args.heads_per_kv, int64_t{p.batch} * p.heads));
  // Long groups of all heads lead, unless there are many chunks of heads and one chunk takes longer than a long group: then they run
  // beside the rest of their head, whose K and V they leave in the cache.
  const int chunks = (p.batch * p.heads + args.heads_per_chunk - 1) / args.heads_per_chunk;
  const int64_t entries = (int64_t{m.n_full} + m.n_part) / m.n_masks;
  const bool within_chunk = chunks >= 6 && p.max_row_tiles * int64_t{multiprocessors} <=
                                               entries * args.heads_per_chunk * warpgroups;
  args.split_groups = within_chunk ? 0 : m.split_rows;
  args.scale_log2 = p.scale * 1.44269504088896340736f;
  args.empty_value = p.masked_row == MaskedRow::kNan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  args.kv_length = p.kv_kind == KvKind::kLength ? p.kv : nullptr;
  args.counter = nullptr;

  const int blocks = std::min(multiprocessors, args.items);
  // Lists of about one length are dealt out statically: zeroing the counter is a launch of its own.
  const bool uneven = int64_t{4} * p.max_row_tiles * m.rows > 5 * entries;
  if (uneven && p.workspace != nullptr && p.workspace_bytes >= sizeof(int) && args.items > blocks) {
    args.counter = static_cast<int*>(p.workspace);
    error = cudaMemsetAsync(args.counter, 0, sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  return p.dtype == DType::kF16 ? launch_type<__half>(args, m, dim, blocks, stream)
                                : launch_type<__nv_bfloat16>(args, m, dim, blocks, stream);
}

}  // namespace stof
