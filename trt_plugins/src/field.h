// One attribute of a node as some TensorRT hands it over. Knows neither TensorRT nor CUDA.
#pragma once
#include <cstdint>

namespace stof {

struct Field {
  enum class Kind { kFloat, kInt, kText, kOther };
  const char* name;
  Kind kind;
  const void* data;
  int32_t length;  // elements; characters of a text, with or without a closing NUL
};

}  // namespace stof
