// What a StofFusedRegion node was created with: its attributes, checked, and their byte form in an engine.
// Knows neither TensorRT nor CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "field.h"

namespace stof {

enum class RegionTemplate : int32_t { kGemmEpilogue = 0, kGatedMlp = 1, kCubin = 2, kGemmNorm = 3 };

struct RegionConfig {
  RegionTemplate template_id = RegionTemplate::kGemmEpilogue;
  int32_t activation = 0;  // stof::Activation
  int32_t has_bias = 0, has_residual = 0;
  int32_t rotated_columns = 0, head_dim = 0;  // of kGemmEpilogue: the first columns are heads that are rotated; both 0: none
  // kGemmNorm; elsewhere all 0.
  int32_t norm = 0;  // stof::Norm
  int32_t has_scale = 0, has_shift = 0, keep_sum = 0;
  float epsilon = 0.0f;
  std::string config = "auto";  // a variant of a GEMM template
  std::string program;          // kCubin: the raw bytes of its program
};

// The attributes a creator declares: name and kind of each, in order.
int32_t region_field_count();
const char* region_field_name(int32_t i);
Field::Kind region_field_kind(int32_t i);

// Fills `config` from attributes; absent ones take their defaults. Returns nullptr, or a sentence about what is wrong
// (written to `error`). Throws std::bad_alloc.
const char* read_region_fields(const Field* fields, int32_t count, RegionConfig& config, char* error, size_t error_size);

// Bytes: magic, format, length, checksum, then words and texts, all little-endian. Throws std::bad_alloc.
std::vector<unsigned char> serialize(const RegionConfig& config);
// Trusts nothing: length, header, checksum, the range of every word, the lengths of the texts. Throws std::bad_alloc.
const char* deserialize(const void* bytes, size_t length, RegionConfig& config, char* error, size_t error_size);

// "name=value name=value ...", for TensorRT's engine inspector; tells any two configurations apart. Throws std::bad_alloc.
std::string describe(const RegionConfig& config);

}  // namespace stof
