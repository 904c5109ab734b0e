// Joins the partial results of split rows: O = sum_i 2^(m_i - M) O_i / sum_i 2^(m_i - M) l_i, in the order of the splits.
#include <algorithm>

#include "epilogue.cuh"
#include "tile_list.cuh"

namespace stof {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ __launch_bounds__(kThreads) void combine_splits(const __grid_constant__ AttentionParams p,
                                                           const __grid_constant__ Schedule s, int kernel_rows) {
  const int order = blockIdx.x % s.long_orders, bh = blockIdx.x / s.long_orders;
  const int b = bh / p.heads, h = bh % p.heads;
  const int per_tile = p.mask.tile_m / kernel_rows;
  const int first_row =
      ordered_row(p.mask, mask_of(p.mask, b, h), order / per_tile) * p.mask.tile_m + order % per_tile * kernel_rows;
  const int slot = blockIdx.x * s.splits;
  T* const out = static_cast<T*>(p.o.ptr) + b * p.o.stride_b + h * p.o.stride_h;
  const int pieces = p.v_dim / 4;
  const float unseen = p.masked_row == MaskedRow::kNan ? NAN : 0.f;
  for (int x = blockIdx.y * kThreads + threadIdx.x; x < kernel_rows * pieces; x += gridDim.y * kThreads) {
    const int row = x / pieces, column = x % pieces * 4;
    if (first_row + row >= p.seq_q) return;
    float top = -INFINITY;
    for (int i = 0; i < s.splits; ++i) top = fmaxf(top, slot_state(p, kernel_rows, slot + i)[2 * row]);
    float sum = 0.f, total[4] = {};
    for (int i = 0; i < s.splits; ++i) {
      const float2 state = *reinterpret_cast<const float2*>(slot_state(p, kernel_rows, slot + i) + 2 * row);
      if (state.y == 0.f) continue;
      const float weight = state.x == top ? 1.f : exp2f(state.x - top);
      const float4 part =
          *reinterpret_cast<const float4*>(slot_output(p, kernel_rows, slot + i) + static_cast<int64_t>(row) * p.v_dim + column);
      sum += weight * state.y;
      total[0] += weight * part.x, total[1] += weight * part.y, total[2] += weight * part.z, total[3] += weight * part.w;
    }
    const float inverse = 1.f / sum;
    T* const at = out + static_cast<int64_t>(first_row + row) * p.o.stride_s + column;
#pragma unroll
    for (int e = 0; e < 4; e += 2)
      store_pair(at + e, sum != 0.f ? total[e] * inverse : unseen, sum != 0.f ? total[e + 1] * inverse : unseen);
  }
}

}  // namespace

cudaError_t launch_combine(const AttentionParams& p, const Schedule& s, int kernel_rows, cudaStream_t stream) {
  if (s.splits == 1) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(s.long_orders) * s.batch_heads, std::max(1, kernel_rows * p.v_dim / 4 / kThreads / 4));
  switch (p.dtype) {
    case DType::kF16: combine_splits<__half><<<grid, kThreads, 0, stream>>>(p, s, kernel_rows); break;
    case DType::kBF16: combine_splits<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(p, s, kernel_rows); break;
    case DType::kF32: combine_splits<float><<<grid, kThreads, 0, stream>>>(p, s, kernel_rows); break;
  }
  return cudaGetLastError();
}

}  // namespace stof
