// fp16 and bf16 products on tensor cores: S = Q K^T and O += P V with mma.m16n8k16, fragments by ldmatrix.
#pragma once
#include "dtype.cuh"
#include "smem_tile.cuh"

namespace stof {

// kBands 16-row bands a warp. With kQInRegs the Q fragments are read from shared memory once.
template <typename T_, int kDim, int kCols, int kBands, bool kQInRegs>
struct HalfEngine {
  using T = T_;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kBlocks8 = kCols / 8;
  static constexpr int kOut8 = kDim / 8;

  uint32_t q_address;   // this lane's row of the first band, before the chunk's swizzle
  uint32_t q_swizzle, k_row, k_swizzle, v_row, v_swizzle;
  uint32_t q_regs[kQInRegs ? kBands : 1][kQInRegs ? kSteps : 1][4];

  using QTile = SmemTile<T, 16, kDim>;

  __device__ HalfEngine(const char* q_shared, int warp, int lane, bool) {
    const uint32_t q_smem = smem_address(q_shared);
    const int row = (lane & 7) + ((lane >> 3) & 1) * 8;  // ldmatrix: matrices 0, 1 stack rows; 2, 3 take the next chunk
    q_address = q_smem + (warp * kBands * 16 + row) * QTile::kRowBytes;
    q_swizzle = ((lane >> 4) ^ QTile::swizzle(row)) << 4;
    const int k_at = (lane & 7) + (lane >> 4) * 8;  // K: matrices 0, 1 take both chunks of 8 keys; 2, 3 the next 8 keys
    k_row = k_at * QTile::kRowBytes;
    k_swizzle = (((lane >> 3) & 1) ^ QTile::swizzle(k_at)) << 4;
    v_row = row * QTile::kRowBytes;
    v_swizzle = q_swizzle;
  }
  __device__ void load_q() {
    if constexpr (kQInRegs) {
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) read_q(q_regs[band][step], band, step);
      }
    }
  }
  __device__ void read_q(uint32_t (&a)[4], int band, int step) const {
    ldmatrix_x4(a, q_address + band * 16 * QTile::kRowBytes + ((step << 5) ^ q_swizzle));
  }
  __device__ void scores(float (&s)[kBands][kBlocks8][4], const char* k_shared) const {
    const uint32_t k_smem = smem_address(k_shared);
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int j = 0; j < kBlocks8; ++j) s[band][j][0] = s[band][j][1] = s[band][j][2] = s[band][j][3] = 0.f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kBands][4];
      if constexpr (!kQInRegs) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) read_q(a[band], band, step);
      }
#pragma unroll
      for (int j = 0; j < kBlocks8; j += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, k_smem + k_row + j * 8 * QTile::kRowBytes + ((step << 5) ^ k_swizzle));
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          const auto& q = [&]() -> const uint32_t(&)[4] {
            if constexpr (kQInRegs) return q_regs[band][step];
            else return a[band];
          }();
          mma_m16n8k16<T>(s[band][j], q, b[0], b[1]);
          mma_m16n8k16<T>(s[band][j + 1], q, b[2], b[3]);
        }
      }
    }
  }
  __device__ void accumulate(float (&o)[kBands][kOut8][4], const float (&p)[kBands][kBlocks8][4],
                             const char* v_shared) const {
    const uint32_t v_smem = smem_address(v_shared);
#pragma unroll
    for (int j = 0; j < kBlocks8; j += 2) {
      uint32_t a[kBands][4];
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        a[band][0] = pack2<T>(p[band][j][0], p[band][j][1]);
        a[band][1] = pack2<T>(p[band][j][2], p[band][j][3]);
        a[band][2] = pack2<T>(p[band][j + 1][0], p[band][j + 1][1]);
        a[band][3] = pack2<T>(p[band][j + 1][2], p[band][j + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kOut8; d += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, v_smem + v_row + j * 8 * QTile::kRowBytes + ((d << 4) ^ v_swizzle));
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          mma_m16n8k16<T>(o[band][d], a[band], b[0], b[1]);
          mma_m16n8k16<T>(o[band][d + 1], a[band], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace stof
