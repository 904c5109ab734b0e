// What a StofAttention node was created with: its attributes, checked, and their byte form in an engine.
// Knows neither TensorRT nor CUDA.
#pragma once
#include <cstddef>
#include <cstdint>

#include "field.h"

namespace stof {

enum class Layout : int32_t { kBHSD = 0, kBSHD = 1, kPacked = 2 };
enum Tensor : int32_t { kQ = 0, kK = 1, kV = 2, kO = 3 };

// Every member is one 32-bit word, described by a row of the table in attention_config.cpp.
struct AttentionConfig {
  float scale, softcap;  // softcap 0: off
  int32_t num_heads, num_kv_heads;
  int32_t head_dim, v_head_dim;  // 0: told by the inputs' shapes; a packed input needs them
  int32_t layout;                // two bits each for Q, K, V, O: layout_of
  int32_t seq;                   // packed: S where it is static; 0: the last input is [B, S, ...]
  int32_t bias_kind, rel_rq;     // stof::BiasKind
  int32_t kv_kind;               // stof::KvKind
  int32_t masked_row;            // stof::MaskedRow
  int32_t f32_math;              // stof::F32Math
  int32_t mask_seq_q, mask_seq_kv;
  int32_t tile_m, tile_n;
  int32_t mask_n_masks, mask_rows, mask_cols, mask_n_full, mask_n_part, mask_max_row_tiles;
  int32_t mask_fragment_order;
  int32_t kernel;  // stof::Kernel
  int32_t splits, split_rows;

  Layout layout_of(Tensor t) const { return static_cast<Layout>((layout >> (2 * t)) & 3); }
  bool packed() const { return layout_of(kQ) == Layout::kPacked; }
};

// The attributes a creator declares: name and kind of each row, in order.
int32_t field_count();
const char* field_name(int32_t i);
Field::Kind field_kind(int32_t i);

// Fills `config` from attributes; absent ones take their defaults. Returns nullptr, or a sentence about what is wrong
// (written to `error`, which has room for `error_size` bytes).
const char* read_fields(const Field* fields, int32_t count, AttentionConfig& config, char* error, size_t error_size);

// Bytes: magic, format, number of words, checksum, then the words, all little-endian.
constexpr size_t kSerializedBytes = 16 + sizeof(AttentionConfig);
void serialize(const AttentionConfig& config, void* bytes);
// Trusts nothing: length, header, checksum, the range of every word, and that the words fit together.
const char* deserialize(const void* bytes, size_t length, AttentionConfig& config, char* error, size_t error_size);

// "name=value name=value ...", for TensorRT's engine inspector. Always NUL-terminated.
void describe(const AttentionConfig& config, char* text, size_t size);

}  // namespace stof
