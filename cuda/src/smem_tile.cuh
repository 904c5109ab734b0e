// A tile of rows x kDim elements in shared memory, in 16-byte chunks swizzled by XOR so that ldmatrix, and the plain
// loads of the fp32 kernels, meet no bank conflict; and its asynchronous load from a strided tensor.
#pragma once
#include "ptx.cuh"

namespace stof {

template <typename T, int kRows, int kDim>
struct SmemTile {
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr int kChunks = kDim / kVec;
  static constexpr int kRowBytes = kDim * sizeof(T);
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kChunks % 4 == 0, "rows of whole 64-byte pieces");

  // Rows whose length is an odd number of 64-byte pieces already alternate between the two halves of the banks.
  __device__ static constexpr int swizzle(int row) { return kChunks % 8 == 0 ? (row & 7) : ((row >> 1) & 3); }
  __device__ static constexpr int offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ swizzle(row)) << 4); }
  // The address 2 * steps chunks after `address`, which is at chunk 0 or 1 of its row in a tile aligned to 128 bytes. Only the
  // chunk bits that the swizzle touches need an XOR; the rest is a constant.
  __device__ static constexpr uint32_t two_chunks_on(uint32_t address, int steps) {
    constexpr int kTouched = kChunks % 8 == 0 ? 4 : 2;  // pairs of chunks in a swizzled group
    return (address ^ (steps % kTouched << 5)) + steps / kTouched * kTouched * 32;
  }
  __device__ static const T* element(const void* base, int row, int d) {
    return reinterpret_cast<const T*>(static_cast<const char*>(base) + offset(row, d / kVec)) + d % kVec;
  }

  // Rows first + [0, kRows) of a tensor at `base` (row stride in elements); rows outside [0, limit) and columns from
  // `dim` on become zero. All kThreads threads take part; the caller commits.
  template <int kThreads>
  __device__ static void load(uint32_t dst, const T* base, int stride, int first, int limit, int dim, int thread) {
    if constexpr (kThreads % kChunks == 0 && kThreads / kChunks % 8 == 0 && kRows % (kThreads / kChunks) == 0) {
      // A thread keeps its chunk and swizzle and steps down the rows.
      constexpr int kStep = kThreads / kChunks;
      const int row = thread / kChunks, chunk = thread % kChunks;
      const T* source = base + static_cast<int64_t>(first + row) * stride + chunk * kVec;
      const uint32_t to = dst + offset(row, chunk);
      const int64_t step = int64_t{kStep} * stride;
      if (dim == kDim && first >= 0 && first + kRows <= limit) {
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i) {
          cp_async16(to + i * kStep * kRowBytes, source);
          source += step;
        }
      } else {
        const unsigned rows_left = chunk * kVec < dim ? limit : 0;
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i) {
          cp_async16(to + i * kStep * kRowBytes, source, static_cast<unsigned>(first + row + i * kStep) < rows_left);
          source += step;
        }
      }
    } else {
      constexpr int kTotal = kRows * kChunks;
#pragma unroll
      for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
        const int index = thread + i * kThreads;
        if (kTotal % kThreads != 0 && index >= kTotal) break;
        const int row = index / kChunks, chunk = index % kChunks;
        const bool valid = static_cast<unsigned>(first + row) < static_cast<unsigned>(limit) && chunk * kVec < dim;
        cp_async16(dst + offset(row, chunk), base + static_cast<int64_t>(first + row) * stride + chunk * kVec, valid);
      }
    }
  }
};

}  // namespace stof
