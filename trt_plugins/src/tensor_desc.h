// A tensor's type and shape as the plugin cores know them, for every TensorRT version alike.
#pragma once
#include <cstdint>

namespace stof {

enum class ElementType : int32_t { kF16, kBF16, kF32, kI32, kOther };

struct TensorDesc {
  ElementType type;
  int32_t rank;
  int64_t dims[8];
};

constexpr int32_t kMaxTensors = 16;  // no node has more inputs and outputs

}  // namespace stof
