#include "region_config.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "fail.h"

namespace stof {
namespace {

constexpr uint32_t kMagic = 0x47525453;  // "STRG"
constexpr uint32_t kFormat = 2;
constexpr size_t kHeaderBytes = 16, kWords = 13, kWordBytes = 4 * kWords;
constexpr size_t kLongestName = 31, kLongestProgram = size_t{256} << 20;

constexpr const char* kTemplates[] = {"gemm_epilogue", "gated_mlp", "cubin", "gemm_norm", nullptr};
constexpr const char* kNorms[] = {"layer_norm", "rms_norm", nullptr};
constexpr const char* kActivations[] = {"none", "relu", "gelu_erf", "gelu_tanh", "silu", nullptr};

struct Row {
  const char* name;
  Field::Kind kind;
};
enum Attribute {
  kTemplate, kActivation, kHasBias, kHasResidual, kRotatedColumns, kHeadDim, kNorm, kHasScale, kHasShift, kKeepSum, kEpsilon, kConfigName, kProgram
};
constexpr Row kRows[] = {{"template", Field::Kind::kText},       {"activation", Field::Kind::kText},
                         {"has_bias", Field::Kind::kInt},        {"has_residual", Field::Kind::kInt},
                         {"rotated_columns", Field::Kind::kInt}, {"head_dim", Field::Kind::kInt},
                         {"kind", Field::Kind::kText},           {"has_scale", Field::Kind::kInt},
                         {"has_shift", Field::Kind::kInt},       {"keep_sum", Field::Kind::kInt},
                         {"epsilon", Field::Kind::kFloat},       {"config", Field::Kind::kText},
                         {"program", Field::Kind::kText}};

int32_t& number(RegionConfig& c, int32_t attribute) {
  switch (attribute) {
    case kHasBias: return c.has_bias;
    case kHasResidual: return c.has_residual;
    case kRotatedColumns: return c.rotated_columns;
    case kHeadDim: return c.head_dim;
    case kHasScale: return c.has_scale;
    case kHasShift: return c.has_shift;
    default: return c.keep_sum;
  }
}

// Index of `text` in a nullptr-terminated list, or -1.
int32_t find(const char* const* names, const std::string& text) {
  for (int32_t i = 0; names[i]; ++i)
    if (text == names[i]) return i;
  return -1;
}

// RFC 4648, padded, without line breaks. False where it is not that.
bool decode_base64(const std::string& text, std::string& bytes) {
  if (text.size() % 4 != 0) return false;
  const auto digit = [](char c) {
    return c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : c >= '0' && c <= '9' ? c - '0' + 52 : c == '+' ? 62 : c == '/' ? 63 : -1;
  };
  bytes.clear();
  bytes.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    const bool last = i + 4 == text.size();
    const int padding = !last || text[i + 3] != '=' ? 0 : text[i + 2] != '=' ? 1 : 2;
    uint32_t word = 0;
    for (int k = 0; k < 4; ++k) {
      const int value = k >= 4 - padding ? 0 : digit(text[i + k]);
      if (value < 0) return false;
      word = word << 6 | static_cast<uint32_t>(value);
    }
    for (int k = 0; k < 3 - padding; ++k) bytes.push_back(static_cast<char>(word >> (16 - 8 * k)));
  }
  return true;
}

uint32_t fnv1a(const unsigned char* bytes, size_t n) {
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < n; ++i) h = (h ^ bytes[i]) * 16777619u;
  return h;
}

uint64_t fnv1a_64(const std::string& text) {
  uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

const char* check(const RegionConfig& c, char* error, size_t size) {
  const auto flag = [](int32_t v) { return v == 0 || v == 1; };
  if (c.template_id < RegionTemplate::kGemmEpilogue || c.template_id > RegionTemplate::kGemmNorm)
    return fail(error, size, "template %d is unknown", static_cast<int>(c.template_id));
  if (c.activation < 0 || c.activation > static_cast<int32_t>(std::size(kActivations)) - 2)
    return fail(error, size, "activation %d is unknown", c.activation);
  if (!flag(c.has_bias)) return fail(error, size, "attribute 'has_bias' is %d, neither 0 nor 1", c.has_bias);
  for (const auto& [name, value] : {std::pair("has_scale", c.has_scale), {"has_shift", c.has_shift}, {"keep_sum", c.keep_sum}})
    if (!flag(value)) return fail(error, size, "attribute '%s' is %d, neither 0 nor 1", name, value);
  if (c.norm < 0 || c.norm > static_cast<int32_t>(std::size(kNorms)) - 2) return fail(error, size, "norm %d is unknown", c.norm);
  if (!(c.epsilon >= 0.0f) || !std::isfinite(c.epsilon)) return fail(error, size, "attribute 'epsilon' is negative or not a finite number");
  const bool norm = c.norm || c.has_scale || c.has_shift || c.keep_sum || c.epsilon != 0.0f;
  if (!flag(c.has_residual)) return fail(error, size, "attribute 'has_residual' is %d, neither 0 nor 1", c.has_residual);
  if (c.config.empty() || c.config.size() > kLongestName)
    return fail(error, size, "attribute 'config' has %zu characters, 1 to %zu are expected", c.config.size(), kLongestName);
  for (const char letter : c.config)
    if (letter <= ' ' || letter > '~') return fail(error, size, "attribute 'config' holds other characters than printable ones");
  if (c.program.size() > kLongestProgram) return fail(error, size, "the program has %zu bytes, which is too many", c.program.size());
  if (c.template_id == RegionTemplate::kCubin) {
    if (c.program.empty()) return fail(error, size, "template 'cubin' needs the attribute 'program'");
    if (c.activation || c.has_bias || c.has_residual || c.rotated_columns || c.head_dim || norm || c.config != "auto")
      return fail(error, size, "template 'cubin' has no attributes but 'program'");
  } else {
    if (!c.program.empty()) return fail(error, size, "only template 'cubin' has the attribute 'program'");
    if (c.template_id == RegionTemplate::kGatedMlp && c.has_residual)
      return fail(error, size, "template 'gated_mlp' has no residual");
    if (c.rotated_columns < 0 || c.head_dim < 0 || (c.rotated_columns == 0) != (c.head_dim == 0) ||
        (c.head_dim && (c.head_dim % 8 != 0 || c.rotated_columns % c.head_dim != 0)))
      return fail(error, size, "%d rotated columns are no whole heads of %d, a multiple of 8", c.rotated_columns, c.head_dim);
    if (c.rotated_columns && (c.template_id != RegionTemplate::kGemmEpilogue || c.activation || c.has_residual))
      return fail(error, size, "rotated columns go with template 'gemm_epilogue' without activation and residual only");
    if (c.template_id == RegionTemplate::kGemmNorm && c.activation) return fail(error, size, "template 'gemm_norm' has no activation");
    if (c.template_id != RegionTemplate::kGemmNorm && norm)
      return fail(error, size, "only template 'gemm_norm' has the attributes of a norm");
  }
  return nullptr;
}

}  // namespace

int32_t region_field_count() { return static_cast<int32_t>(std::size(kRows)); }
const char* region_field_name(int32_t i) { return kRows[i].name; }
Field::Kind region_field_kind(int32_t i) { return kRows[i].kind; }

const char* read_region_fields(const Field* fields, int32_t count, RegionConfig& config, char* error, size_t error_size) {
  config = RegionConfig();
  bool has_template = false, has_epsilon = false;
  for (int32_t f = 0; f < count; ++f) {
    const Field& field = fields[f];
    int32_t i = 0;
    while (i < region_field_count() && !(field.name && std::strcmp(field.name, kRows[i].name) == 0)) ++i;
    if (i == region_field_count()) continue;  // such as plugin_version
    const char* const name = kRows[i].name;
    if (!field.data || field.length < 1) return fail(error, error_size, "attribute '%s' is empty", name);
    if (field.kind != kRows[i].kind) return fail(error, error_size, "attribute '%s' has the wrong type", name);
    if (field.kind == Field::Kind::kInt) {
      if (field.length != 1) return fail(error, error_size, "attribute '%s' has %d values, not one", name, field.length);
      std::memcpy(&number(config, i), field.data, 4);
      continue;
    }
    if (field.kind == Field::Kind::kFloat) {
      if (field.length != 1) return fail(error, error_size, "attribute '%s' has %d values, not one", name, field.length);
      std::memcpy(&config.epsilon, field.data, 4);
      has_epsilon = true;
      continue;
    }
    const char* const data = static_cast<const char*>(field.data);
    const std::string text(data, strnlen(data, static_cast<size_t>(field.length)));
    int32_t found = 0;
    if (i == kTemplate) {
      found = find(kTemplates, text);
      config.template_id = static_cast<RegionTemplate>(found);
      has_template = true;
    } else if (i == kActivation) {
      found = config.activation = find(kActivations, text);
    } else if (i == kNorm) {
      found = config.norm = find(kNorms, text);
    } else if (i == kConfigName) {
      config.config = text;
    } else if (!decode_base64(text, config.program)) {
      return fail(error, error_size, "attribute 'program' is not base64");
    }
    if (found < 0) return fail(error, error_size, "attribute '%s' is '%.60s', which is unknown", name, text.c_str());
  }
  if (!has_template) return fail(error, error_size, "attribute 'template' is missing");
  if (config.template_id == RegionTemplate::kGemmNorm && !has_epsilon)
    return fail(error, error_size, "attribute 'epsilon' is missing");
  return check(config, error, error_size);
}

std::vector<unsigned char> serialize(const RegionConfig& c) {
  std::vector<unsigned char> out(kHeaderBytes + kWordBytes + c.config.size() + c.program.size());
  int32_t epsilon;
  std::memcpy(&epsilon, &c.epsilon, 4);
  const int32_t words[kWords] = {static_cast<int32_t>(c.template_id), c.activation, c.has_bias, c.has_residual, c.rotated_columns,
                                 c.head_dim, c.norm, c.has_scale, c.has_shift, c.keep_sum, epsilon,
                                 static_cast<int32_t>(c.config.size()), static_cast<int32_t>(c.program.size())};
  unsigned char* const body = out.data() + kHeaderBytes;
  std::memcpy(body, words, sizeof words);
  std::memcpy(body + kWordBytes, c.config.data(), c.config.size());
  std::memcpy(body + kWordBytes + c.config.size(), c.program.data(), c.program.size());
  const uint32_t header[4] = {kMagic, kFormat, static_cast<uint32_t>(out.size()), fnv1a(body, out.size() - kHeaderBytes)};
  std::memcpy(out.data(), header, sizeof header);
  return out;
}

const char* deserialize(const void* bytes, size_t length, RegionConfig& config, char* error, size_t error_size) {
  if (!bytes || length < kHeaderBytes + kWordBytes || length > kHeaderBytes + kWordBytes + kLongestName + kLongestProgram)
    return fail(error, error_size, "the engine holds %zu bytes for this plugin, which is no region", length);
  const unsigned char* const in = static_cast<const unsigned char*>(bytes);
  uint32_t header[4];
  std::memcpy(header, in, sizeof header);
  if (header[0] != kMagic) return fail(error, error_size, "the engine's bytes for this plugin do not start with its mark");
  if (header[1] != kFormat)
    return fail(error, error_size, "the engine was built with another version of this plugin library (format %u)", header[1]);
  if (header[2] != length)
    return fail(error, error_size, "the engine holds %zu bytes for this plugin, %u are expected", length, header[2]);
  const unsigned char* const body = in + kHeaderBytes;
  if (header[3] != fnv1a(body, length - kHeaderBytes))
    return fail(error, error_size, "the engine's bytes for this plugin are damaged (checksum)");
  int32_t words[kWords];
  std::memcpy(words, body, sizeof words);
  const size_t rest = length - kHeaderBytes - kWordBytes;
  const int32_t name = words[kWords - 2], program = words[kWords - 1];
  if (name < 0 || program < 0 || static_cast<size_t>(name) + static_cast<size_t>(program) != rest)
    return fail(error, error_size, "the engine's bytes for this plugin hold texts of %d and %d bytes in %zu", name, program, rest);
  const char* const texts = reinterpret_cast<const char*>(body + kWordBytes);
  config.template_id = static_cast<RegionTemplate>(words[0]);
  config.activation = words[1];
  config.has_bias = words[2];
  config.has_residual = words[3];
  config.rotated_columns = words[4];
  config.head_dim = words[5];
  config.norm = words[6];
  config.has_scale = words[7];
  config.has_shift = words[8];
  config.keep_sum = words[9];
  std::memcpy(&config.epsilon, &words[10], 4);
  config.config.assign(texts, static_cast<size_t>(name));
  config.program.assign(texts + name, static_cast<size_t>(program));
  return check(config, error, error_size);
}

std::string describe(const RegionConfig& c) {
  std::string text = std::string("template=") + kTemplates[static_cast<int32_t>(c.template_id)];
  if (c.template_id == RegionTemplate::kCubin) {
    char program[64];
    std::snprintf(program, sizeof program, " program=%016llx bytes=%zu", static_cast<unsigned long long>(fnv1a_64(c.program)),
                  c.program.size());
    return text + program;
  }
  text += std::string(" activation=") + kActivations[c.activation];
  text += c.has_bias ? " has_bias=1" : " has_bias=0";
  text += c.has_residual ? " has_residual=1" : " has_residual=0";
  if (c.rotated_columns) text += " rotated_columns=" + std::to_string(c.rotated_columns) + " head_dim=" + std::to_string(c.head_dim);
  if (c.template_id == RegionTemplate::kGemmNorm) {
    char norm[128];
    std::snprintf(norm, sizeof norm, " kind=%s has_scale=%d has_shift=%d keep_sum=%d epsilon=%.9g", kNorms[c.norm], c.has_scale, c.has_shift,
                  c.keep_sum, static_cast<double>(c.epsilon));
    text += norm;
  }
  return text + " config=" + c.config;
}

}  // namespace stof
