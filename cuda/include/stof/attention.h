// Forward attention over a BSR + bitmap mask: the public face of cuda/. POD parameters, a stream, a cudaError_t.
// No allocation, no synchronisation, no global state: every call can be captured in a CUDA graph.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace stof {

enum class DType : int32_t { kF16 = 0, kBF16 = 1, kF32 = 2 };
enum class BiasKind : int32_t { kNone = 0, kDense = 1, kRelative = 2 };
enum class KvKind : int32_t { kNone = 0, kMask = 1, kLength = 2 };
enum class MaskedRow : int32_t { kZero = 0, kMean = 1, kScores = 2, kNan = 3 };
// How fp32 tensors are multiplied. Tensor cores round to tf32 only when asked for.
enum class F32Math : int32_t { kFfma = 0, kTf32x3 = 1, kTf32 = 2 };
// Order of a part tile's bits. kTiles: one uint64 per 8x8 inner tile, [tile_m/8][tile_n/8], element (r, c) is bit 8r + c.
// kFragments (made by lowering, same bytes): uint32 [tile_m/16][tile_n/64][32 lanes]; bit 4j + 2i + e of lane l is element
// (row 8i + l/4, column 8j + 2(l%4) + e) of the 16x64 band, the accumulator order of mma and wgmma: one coalesced load a
// band. With tile_n = 32, uint16 [tile_m/16][32].
enum class BitmapOrder : int32_t { kTiles = 0, kFragments = 1 };
enum class Kernel : int32_t { kRowWise = 0, kBlockSm80 = 1, kBlockSm90 = 2 };

// One of Q, K, V, O. Element (b, h, s, d) is at ptr + b*stride_b + h*stride_h + s*stride_s + d (strides in elements),
// so BHSD, BSHD and packed QKV are the same code. 16-byte alignment of ptr and of all strides is required.
struct TensorView {
  void* ptr;
  int64_t stride_b, stride_h, stride_s;
};

// Mask format version 1 (docs/mask_format.md) in tiles of tile_m x tile_n. Device pointers.
struct MaskView {
  const int32_t* full_row_ptr;  // [n_masks, rows+1], absolute into full_col_idx
  const int32_t* full_col_idx;  // [n_full or 1]
  const int32_t* part_row_ptr;  // [n_masks, rows+1]
  const int32_t* part_col_idx;  // [n_part or 1]
  const uint2* bitmap;          // [n_part or 1, tile_m/8, tile_n/8], x = low word, in `bitmap_order`
  const int32_t* row_order;     // [n_masks, rows], row tiles by falling work
  const int32_t* mask_index;    // [index_b, index_h]
  int32_t index_b, index_h;     // each 1 or B / Hq
  int32_t n_masks, rows, cols;  // tiles of the encoded mask (which may be larger than Sq x Skv)
  int32_t n_full, n_part;       // indices are clamped to these: device arrays are not trusted
  int32_t tile_m, tile_n;
  int32_t split_rows;           // leading entries of each row_order (the longest rows): started first for all heads, and with
                                // splits > 1 their lists are split. 0: all rows with splits > 1, else none (kBlockSm80);
                                // see attention_sm90 for its lowered form
  BitmapOrder bitmap_order;
};

struct AttentionParams {
  TensorView q, k, v, o;
  int32_t batch, heads, kv_heads;  // heads % kv_heads == 0
  int32_t seq_q, seq_kv;
  int32_t dim, v_dim;              // multiples of 8, up to 256
  DType dtype;
  F32Math f32_math;
  float scale, softcap;            // softcap 0: off
  MaskView mask;
  BiasKind bias_kind;
  const void* bias;                // dtype of Q; dense [bias_b, bias_h, Sq, Skv] with strides; relative [bias_h, rel_len]
  int64_t bias_stride_b, bias_stride_h, bias_stride_q;  // 0 where broadcast
  int32_t rel_rq, rel_len;         // relative: entry k - q + rel_rq - 1, inside [0, rel_len)
  KvKind kv_kind;
  const int32_t* kv;               // mask [B, Skv] (1 = attend, row stride kv_stride) or length [B]
  int64_t kv_stride;
  MaskedRow masked_row;
  // Configuration, chosen offline (lowering) from mask statistics.
  Kernel kernel;
  int32_t splits;                  // 1: no split over keys. masked_row kMean and kScores need 1
  int32_t max_row_tiles;           // longest full+part list of any row
  void* workspace;                 // attention_workspace_bytes(), 256-byte aligned; may be null when that is 0
  size_t workspace_bytes;
};

// Bytes of workspace `p` needs (0 without a split). Pure arithmetic on p's sizes.
size_t attention_workspace_bytes(const AttentionParams& p);

// nullptr when some instance can run `p`, else a static sentence saying what is not supported.
const char* attention_unsupported(const AttentionParams& p);

// Enqueues O = softmax(softcap(scale * Q K^T) + bias, over allowed keys) V. cudaErrorInvalidValue when
// attention_unsupported(p) is not null or the workspace is too small.
cudaError_t attention_forward(const AttentionParams& p, cudaStream_t stream);

}  // namespace stof
