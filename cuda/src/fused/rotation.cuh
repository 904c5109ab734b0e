// Rotary position embedding of neighbouring columns, in fp32 (stof/fused.h says what it computes).
#pragma once
#include <cstdint>

namespace stof::sm90 {

struct Rotation {
  const float2* table;  // [positions][head_dim / 2]
  int32_t columns;      // that are rotated; 0: none
  int32_t head_dim, positions;

  __device__ __forceinline__ const float2* row(int row) const {
    return table + int64_t{row % positions} * (head_dim / 2);
  }
};

__device__ __forceinline__ void rotate_pair(float& x, float& y, float2 turn) {
  const float first = fmaf(x, turn.x, -y * turn.y);
  y = fmaf(y, turn.x, x * turn.y);
  x = first;
}

}  // namespace stof::sm90
