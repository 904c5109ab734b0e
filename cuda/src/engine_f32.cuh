// fp32 products in the same accumulator layout as the half engines, so that softmax, bitmaps and epilogue are shared:
// exact FFMA, or mma.m16n8k8 in tf32 (once, or three times on a high and a low part: close to fp32's accuracy).
#pragma once
#include "dtype.cuh"
#include "smem_tile.cuh"

namespace stof {

template <int kDim, int kCols>
struct FfmaEngine {
  using T = float;
  static constexpr int kBlocks8 = kCols / 8;
  static constexpr int kOut8 = kDim / 8;
  using Tile = SmemTile<float, 16, kDim>;

  const char* q_rows;  // the warp's 16 rows
  int group, quad;     // lane / 4, lane % 4

  __device__ FfmaEngine(const char* q_smem, int warp, int lane, bool)
      : q_rows(q_smem + warp * Tile::kBytes), group(lane / 4), quad(lane % 4) {}
  __device__ void load_q() {}

  __device__ void scores(float (&s)[1][kBlocks8][4], const char* k_smem) const {
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) s[0][j][0] = s[0][j][1] = s[0][j][2] = s[0][j][3] = 0.f;
#pragma unroll 2
    for (int d = 0; d < kDim; d += 4) {
      float q[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) Vec16<float>::load(q[i], Tile::element(q_rows, group + 8 * i, d));
#pragma unroll
      for (int j = 0; j < kBlocks8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float k[4];
          Vec16<float>::load(k, Tile::element(k_smem, 8 * j + 2 * quad + e, d));
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int x = 0; x < 4; ++x) s[0][j][2 * i + e] = fmaf(q[i][x], k[x], s[0][j][2 * i + e]);
        }
      }
    }
  }
  __device__ void accumulate(float (&o)[1][kOut8][4], const float (&p)[1][kBlocks8][4], const char* v_smem) const {
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
#pragma unroll
      for (int key = 0; key < 8; ++key) {
        const int owner = 4 * group + key / 2;  // the lane of this quad that holds the key's probabilities
        const float p0 = __shfl_sync(~0u, p[0][j][key % 2], owner), p1 = __shfl_sync(~0u, p[0][j][2 + key % 2], owner);
#pragma unroll
        for (int d = 0; d < kOut8; ++d) {
          const float2 v = *reinterpret_cast<const float2*>(Tile::element(v_smem, 8 * j + key, 8 * d + 2 * quad));
          o[0][d][0] = fmaf(p0, v.x, o[0][d][0]);
          o[0][d][1] = fmaf(p0, v.y, o[0][d][1]);
          o[0][d][2] = fmaf(p1, v.x, o[0][d][2]);
          o[0][d][3] = fmaf(p1, v.y, o[0][d][3]);
        }
      }
    }
  }
};

// The order of the summed index is free as long as both operands agree: lane t of a quad takes 2t and 2t + 1 of each 8
// instead of t and t + 4, so that probabilities become the A operand without a shuffle.
template <int kDim, int kCols>
struct Tf32Engine {
  using T = float;
  static constexpr int kBlocks8 = kCols / 8;
  static constexpr int kOut8 = kDim / 8;
  using Tile = SmemTile<float, 16, kDim>;

  const char* q_rows;
  int group, quad;
  bool three;

  __device__ Tf32Engine(const char* q_smem, int warp, int lane, bool three_)
      : q_rows(q_smem + warp * Tile::kBytes), group(lane / 4), quad(lane % 4), three(three_) {}
  __device__ void load_q() {}

  struct Split {
    uint32_t high, low;
  };
  __device__ static Split split(float x) {
    const uint32_t high = round_tf32(x);
    return {high, round_tf32(x - __uint_as_float(high))};
  }
  __device__ void multiply(float (&c)[4], const float (&a)[4], float b0, float b1) const {
    Split as[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) as[i] = split(a[i]);
    const Split bs[2] = {split(b0), split(b1)};
    const uint32_t high[4] = {as[0].high, as[1].high, as[2].high, as[3].high};
    if (three) {
      const uint32_t low[4] = {as[0].low, as[1].low, as[2].low, as[3].low};
      // From zero and added with FADD, which rounds to nearest: the tensor cores' own accumulation truncates.
      float sum[4] = {};
      mma_m16n8k8_tf32(sum, low, bs[0].high, bs[1].high);
      mma_m16n8k8_tf32(sum, high, bs[0].low, bs[1].low);
      mma_m16n8k8_tf32(sum, high, bs[0].high, bs[1].high);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += sum[i];
      return;
    }
    mma_m16n8k8_tf32(c, high, bs[0].high, bs[1].high);
  }
  __device__ void scores(float (&s)[1][kBlocks8][4], const char* k_smem) const {
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) s[0][j][0] = s[0][j][1] = s[0][j][2] = s[0][j][3] = 0.f;
#pragma unroll 2
    for (int d = 0; d < kDim; d += 8) {
      const float2 q0 = pair(q_rows, group, d + 2 * quad), q1 = pair(q_rows, group + 8, d + 2 * quad);
      const float a[4] = {q0.x, q1.x, q0.y, q1.y};
#pragma unroll
      for (int j = 0; j < kBlocks8; ++j) {
        const float2 k = pair(k_smem, 8 * j + group, d + 2 * quad);
        multiply(s[0][j], a, k.x, k.y);
      }
    }
  }
  __device__ void accumulate(float (&o)[1][kOut8][4], const float (&p)[1][kBlocks8][4], const char* v_smem) const {
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
      const float a[4] = {p[0][j][0], p[0][j][2], p[0][j][1], p[0][j][3]};
#pragma unroll
      for (int d = 0; d < kOut8; ++d) {
        multiply(o[0][d], a, *Tile::element(v_smem, 8 * j + 2 * quad, 8 * d + group),
                 *Tile::element(v_smem, 8 * j + 2 * quad + 1, 8 * d + group));
      }
    }
  }
  __device__ static float2 pair(const char* base, int row, int d) {
    return *reinterpret_cast<const float2*>(Tile::element(base, row, d));
  }
};

}  // namespace stof
