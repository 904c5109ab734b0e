// Bits of part tiles in the accumulator layout of mma.m16n8: for a 16 x 32 piece each lane holds 16 bits, bit
// 4j + 2i + e for the element (row 8i + lane/4, column 8j + 2(lane%4) + e).
#pragma once
#include "stof/attention.h"

namespace stof {

// Lane's 16 bits of rows 16*m16 and columns 32*n32 of part tile `entry` (index into bitmap).
__device__ __forceinline__ uint32_t fragment_bits16(const MaskView& m, int entry, int m16, int n32, int lane) {
  if (m.bitmap_order == BitmapOrder::kFragments) {
    const int64_t band = static_cast<int64_t>(entry) * (m.tile_m / 16) + m16;
    const int64_t at = m.tile_n == 32 ? band * 32 + lane : ((band * (m.tile_n / 64) + n32 / 2) * 32 + lane) * 2 + n32 % 2;
    return __ldg(reinterpret_cast<const uint16_t*>(m.bitmap) + at);
  }
  const int inner_n = m.tile_n / 8;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(
      m.bitmap + (static_cast<int64_t>(entry) * (m.tile_m / 8) + 2 * m16) * inner_n + 4 * n32) + (lane >> 4);
  const int shift = 2 * (lane & 15);
  uint32_t bits = 0;
#pragma unroll 1  // few registers: scores and output are live around this, and lowering can give fragments
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) bits |= ((__ldg(words + 2 * (i * inner_n + j)) >> shift) & 3u) << (4 * j + 2 * i);
  }
  return bits;
}

// Lane's bits of a 16-row band of kCols columns, 64 columns to a word, for mask tiles of exactly kRows x kCols.
template <int kRows, int kCols>
struct BandBits {
  static constexpr int kWords = kCols <= 64 ? 1 : kCols / 64;
  static_assert(kCols == 32 || kCols % 64 == 0);
  uint32_t word[kWords];

  __device__ void load(const MaskView& m, int entry, int m16, int lane) {
    if (m.bitmap_order == BitmapOrder::kFragments) {
      const int64_t band = static_cast<int64_t>(entry) * (kRows / 16) + m16;
      if constexpr (kCols == 32) {
        word[0] = __ldg(reinterpret_cast<const uint16_t*>(m.bitmap) + band * 32 + lane);
      } else {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(m.bitmap) + band * kWords * 32 + lane;
#pragma unroll
        for (int w = 0; w < kWords; ++w) word[w] = __ldg(words + 32 * w);
      }
      return;
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      word[w] = fragment_bits16(m, entry, m16, 2 * w, lane);
      if constexpr (kCols > 32) word[w] |= fragment_bits16(m, entry, m16, 2 * w + 1, lane) << 16;
    }
  }
  __device__ bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all |= word[w];
    return all != 0;
  }
  __device__ bool every() const {
    if constexpr (kCols == 32) return word[0] == 0xFFFFu;
    uint32_t all = ~0u;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all &= word[w];
    return all == ~0u;
  }
  // Bit of accumulator element c (0..3) of the n8 block j.
  __device__ bool allowed(int j, int c) const { return (word[j / 8] >> (4 * (j % 8) + c)) & 1u; }
};

}  // namespace stof
