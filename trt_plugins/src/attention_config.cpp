#include "attention_config.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>

#include "fail.h"

namespace stof {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr uint32_t kMagic = 0x464f5453;  // "STOF"
constexpr uint32_t kFormat = 1;
constexpr size_t kWords = sizeof(AttentionConfig) / 4;
constexpr float kAny = std::numeric_limits<float>::quiet_NaN();

constexpr const char* kBiasKinds[] = {"none", "dense", "relative", nullptr};
constexpr const char* kKvKinds[] = {"none", "mask", "length", nullptr};
constexpr const char* kMaskedRows[] = {"zero", "mean", "scores", "nan", nullptr};
constexpr const char* kF32Maths[] = {"ffma", "tf32x3", "tf32", nullptr};
constexpr const char* kKernels[] = {"row_wise", "block_sm80", "block_sm90", nullptr};
constexpr const char* kLayouts[] = {"BHSD", "BSHD", "packed", nullptr};

enum class Type { kFloat, kInt, kEnum, kLayout };

struct Row {
  const char* name;
  Type type;
  size_t offset;
  int32_t low, high, fallback;  // of ints and enums; kRequired: the attribute must be given
  float float_fallback;         // NaN: must be given
  const char* const* names;     // of enums
};

constexpr int32_t kRequired = std::numeric_limits<int32_t>::min();

#define FLOAT(name, fallback) {#name, Type::kFloat, offsetof(AttentionConfig, name), 0, 0, 0, fallback, nullptr}
#define INT(name, low, high, fallback) {#name, Type::kInt, offsetof(AttentionConfig, name), low, high, fallback, 0, nullptr}
#define ENUM(name, names, fallback) \
  {#name, Type::kEnum, offsetof(AttentionConfig, name), 0, static_cast<int32_t>(std::size(names)) - 2, fallback, 0, names}

constexpr Row kRows[] = {
    FLOAT(scale, kAny),
    FLOAT(softcap, 0),
    INT(num_heads, 1, 1 << 20, kRequired),
    INT(num_kv_heads, 1, 1 << 20, kRequired),
    INT(head_dim, 0, 256, 0),
    INT(v_head_dim, 0, 256, 0),
    {"layout", Type::kLayout, offsetof(AttentionConfig, layout), 0, 255, kRequired, 0, kLayouts},
    INT(seq, 0, kMax, 0),
    ENUM(bias_kind, kBiasKinds, 0),
    INT(rel_rq, 0, kMax, 0),
    ENUM(kv_kind, kKvKinds, 0),
    ENUM(masked_row, kMaskedRows, 0),
    ENUM(f32_math, kF32Maths, 0),
    INT(mask_seq_q, 1, kMax, kRequired),
    INT(mask_seq_kv, 1, kMax, kRequired),
    INT(tile_m, 8, 1024, kRequired),
    INT(tile_n, 8, 1024, kRequired),
    INT(mask_n_masks, 1, kMax, kRequired),
    INT(mask_rows, 1, kMax, kRequired),
    INT(mask_cols, 1, kMax, kRequired),
    INT(mask_n_full, 0, kMax, kRequired),
    INT(mask_n_part, 0, kMax, kRequired),
    INT(mask_max_row_tiles, 0, kMax, kRequired),
    INT(mask_fragment_order, 0, 1, 0),
    ENUM(kernel, kKernels, kRequired),
    INT(splits, 1, 256, 1),
    INT(split_rows, 0, kMax, 0),
};
#undef FLOAT
#undef INT
#undef ENUM
static_assert(std::size(kRows) == kWords, "every word of AttentionConfig has its row");

int32_t get_int(const AttentionConfig& c, const Row& r) {
  int32_t v;
  std::memcpy(&v, reinterpret_cast<const char*>(&c) + r.offset, 4);
  return v;
}

float get_float(const AttentionConfig& c, const Row& r) {
  float v;
  std::memcpy(&v, reinterpret_cast<const char*>(&c) + r.offset, 4);
  return v;
}

template <class T>
void put(AttentionConfig& c, const Row& r, T v) {
  static_assert(sizeof(T) == 4, "one word");
  std::memcpy(reinterpret_cast<char*>(&c) + r.offset, &v, 4);
}

// Index of text[0..length) in a nullptr-terminated list, or -1.
int32_t find(const char* const* names, const char* text, size_t length) {
  for (int32_t i = 0; names[i]; ++i)
    if (std::strlen(names[i]) == length && std::memcmp(names[i], text, length) == 0) return i;
  return -1;
}

// "BSHD" for all four, or "Q,K,V,O" one by one; -1: neither.
int32_t parse_layout(const char* text, size_t length) {
  int32_t word = 0, n = 0;
  for (size_t begin = 0; begin <= length;) {
    const void* comma = std::memchr(text + begin, ',', length - begin);
    const size_t end = comma ? static_cast<size_t>(static_cast<const char*>(comma) - text) : length;
    const int32_t one = find(kLayouts, text + begin, end - begin);
    if (one < 0 || n == 4) return -1;
    word |= one << (2 * n++);
    begin = end + 1;
  }
  if (n == 1) return word * 0x55;
  return n == 4 ? word : -1;
}

const char* check(const AttentionConfig& c, char* error, size_t size) {
  for (const Row& r : kRows) {
    if (r.type == Type::kFloat) {
      if (!std::isfinite(get_float(c, r))) return fail(error, size, "attribute '%s' is not a finite number", r.name);
      continue;
    }
    const int32_t v = get_int(c, r);
    if (v < r.low || v > r.high)
      return fail(error, size, "attribute '%s' is %d, outside [%d, %d]", r.name, v, r.low, r.high);
  }
  if (c.softcap < 0) return fail(error, size, "attribute 'softcap' is negative");
  if (c.num_heads % c.num_kv_heads)
    return fail(error, size, "num_heads %d is not a multiple of num_kv_heads %d", c.num_heads, c.num_kv_heads);
  int32_t n_packed = 0;
  for (Tensor t : {kQ, kK, kV, kO}) {
    if (static_cast<int32_t>(c.layout_of(t)) > 2) return fail(error, size, "attribute 'layout' holds an unknown layout");
    n_packed += c.layout_of(t) == Layout::kPacked;
  }
  if (n_packed != 0 && n_packed != 4) return fail(error, size, "layout 'packed' stands for all of Q, K, V and O or none");
  if (c.packed() && (c.head_dim == 0 || c.v_head_dim == 0))
    return fail(error, size, "layout 'packed' needs the attributes head_dim and v_head_dim");
  if (c.head_dim % 8 || c.v_head_dim % 8) return fail(error, size, "head_dim and v_head_dim are multiples of 8");
  if (c.tile_m % 8 || c.tile_n % 8)
    return fail(error, size, "tile_m %d and tile_n %d are multiples of 8", c.tile_m, c.tile_n);
  if (c.bias_kind == find(kBiasKinds, "relative", 8) && c.rel_rq < 1)
    return fail(error, size, "a relative bias needs the attribute rel_rq >= 1");
  if (c.mask_cols != c.mask_seq_kv / c.tile_n + (c.mask_seq_kv % c.tile_n != 0))
    return fail(error, size, "mask_cols %d does not fit mask_seq_kv %d in tiles of %d", c.mask_cols, c.mask_seq_kv, c.tile_n);
  if (c.mask_max_row_tiles > c.mask_cols)
    return fail(error, size, "mask_max_row_tiles %d is more than mask_cols %d", c.mask_max_row_tiles, c.mask_cols);
  return nullptr;
}

uint32_t fnv1a(const unsigned char* bytes, size_t n) {
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < n; ++i) h = (h ^ bytes[i]) * 16777619u;
  return h;
}

}  // namespace

int32_t field_count() { return static_cast<int32_t>(kWords); }
const char* field_name(int32_t i) { return kRows[i].name; }
Field::Kind field_kind(int32_t i) {
  switch (kRows[i].type) {
    case Type::kFloat: return Field::Kind::kFloat;
    case Type::kInt: return Field::Kind::kInt;
    default: return Field::Kind::kText;
  }
}

const char* read_fields(const Field* fields, int32_t count, AttentionConfig& config, char* error, size_t error_size) {
  if (count < 0 || (count > 0 && !fields)) return fail(error, error_size, "the attributes are missing");
  bool given[kWords] = {};
  for (size_t i = 0; i < kWords; ++i) {
    const Row& r = kRows[i];
    if (r.type == Type::kFloat)
      put(config, r, r.float_fallback);
    else
      put(config, r, r.fallback);
  }
  for (int32_t f = 0; f < count; ++f) {
    const Field& field = fields[f];
    if (!field.name) continue;
    size_t i = 0;
    while (i < kWords && std::strcmp(kRows[i].name, field.name) != 0) ++i;
    if (i == kWords) continue;  // not ours: plugin_version, plugin_namespace
    const Row& r = kRows[i];
    if (!field.data || field.length < 1) return fail(error, error_size, "attribute '%s' is empty", r.name);
    if (field.kind != field_kind(static_cast<int32_t>(i)))
      return fail(error, error_size, "attribute '%s' has the wrong type", r.name);
    if (field_kind(static_cast<int32_t>(i)) != Field::Kind::kText) {
      if (field.length != 1) return fail(error, error_size, "attribute '%s' has %d values, not one", r.name, field.length);
      int32_t word;
      std::memcpy(&word, field.data, 4);
      put(config, r, word);
    } else {
      const char* text = static_cast<const char*>(field.data);
      const size_t length = strnlen(text, static_cast<size_t>(field.length));
      const int32_t v = r.type == Type::kLayout ? parse_layout(text, length) : find(r.names, text, length);
      if (v < 0)
        return fail(error, error_size, "attribute '%s' is '%.*s', which is unknown", r.name,
                    static_cast<int>(length < 60 ? length : 60), text);
      put(config, r, v);
    }
    given[i] = true;
  }
  for (size_t i = 0; i < kWords; ++i) {
    const Row& r = kRows[i];
    const bool required = r.type == Type::kFloat ? std::isnan(r.float_fallback) : r.fallback == kRequired;
    if (required && !given[i]) return fail(error, error_size, "attribute '%s' is missing", r.name);
  }
  return check(config, error, error_size);
}

void serialize(const AttentionConfig& config, void* bytes) {
  unsigned char* out = static_cast<unsigned char*>(bytes);
  std::memcpy(out + 16, &config, sizeof config);
  const uint32_t header[4] = {kMagic, kFormat, static_cast<uint32_t>(kWords), fnv1a(out + 16, sizeof config)};
  std::memcpy(out, header, sizeof header);
}

const char* deserialize(const void* bytes, size_t length, AttentionConfig& config, char* error, size_t error_size) {
  if (!bytes || length != kSerializedBytes)
    return fail(error, error_size, "the engine holds %zu bytes for this plugin, %zu are expected", length, kSerializedBytes);
  const unsigned char* in = static_cast<const unsigned char*>(bytes);
  uint32_t header[4];
  std::memcpy(header, in, sizeof header);
  if (header[0] != kMagic) return fail(error, error_size, "the engine's bytes for this plugin do not start with its mark");
  if (header[1] != kFormat || header[2] != kWords)
    return fail(error, error_size, "the engine was built with another version of this plugin library (format %u, %u words)",
                header[1], header[2]);
  if (header[3] != fnv1a(in + 16, sizeof config))
    return fail(error, error_size, "the engine's bytes for this plugin are damaged (checksum)");
  std::memcpy(&config, in + 16, sizeof config);
  return check(config, error, error_size);
}

void describe(const AttentionConfig& config, char* text, size_t size) {
  size_t at = 0;
  if (size) text[0] = '\0';
  for (const Row& r : kRows) {
    if (at >= size) return;
    int n = 0;
    if (r.type == Type::kFloat)
      n = std::snprintf(text + at, size - at, "%s=%.9g ", r.name, static_cast<double>(get_float(config, r)));
    else if (r.type == Type::kEnum)
      n = std::snprintf(text + at, size - at, "%s=%s ", r.name, r.names[get_int(config, r)]);
    else if (r.type == Type::kLayout)
      n = std::snprintf(text + at, size - at, "layout=%s,%s,%s,%s ", kLayouts[get_int(config, r) & 3],
                        kLayouts[(get_int(config, r) >> 2) & 3], kLayouts[(get_int(config, r) >> 4) & 3],
                        kLayouts[(get_int(config, r) >> 6) & 3]);
    else
      n = std::snprintf(text + at, size - at, "%s=%d ", r.name, get_int(config, r));
    if (n > 0) at += static_cast<size_t>(n);
  }
}

}  // namespace stof
