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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kStepUnroll = 1;
#else
  static constexpr int kStepUnroll = 2;
#endif
  // This lane's address in the warp's first Q band, in a K tile and in a V tile, at chunk 0. ldmatrix: for Q and V matrices
  // 0, 1 stack rows and 2, 3 take the next chunk; for K matrices 0, 1 take both chunks of 8 keys and 2, 3 the next 8 keys.
  uint32_t q_at, k_at, v_at;
  uint32_t q_regs[kQInRegs ? kBands : 1][kQInRegs ? kSteps : 1][4];

  using QTile = SmemTile<T, 16, kDim>;

  __device__ HalfEngine(const char* q_shared, int warp, int lane, bool) {
    const uint32_t q_smem = smem_address(q_shared);
    const int row = (lane & 7) + ((lane >> 3) & 1) * 8, k_row = (lane & 7) + (lane >> 4) * 8;
    v_at = QTile::offset(row, lane >> 4);
    k_at = QTile::offset(k_row, (lane >> 3) & 1);
    q_at = q_smem + warp * kBands * QTile::kBytes + v_at;
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
    ldmatrix_x4(a, QTile::two_chunks_on(q_at, step) + band * QTile::kBytes);
  }
  __device__ void scores(float (&s)[kBands][kBlocks8][4], const char* k_shared) const {
    const uint32_t at = smem_address(k_shared) + k_at;
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int j = 0; j < kBlocks8; ++j) s[band][j][0] = s[band][j][1] = s[band][j][2] = s[band][j][3] = 0.f;
#pragma unroll(kQInRegs ? kSteps : kStepUnroll)
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kBands][4];
      if constexpr (!kQInRegs) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) read_q(a[band], band, step);
      }
#pragma unroll
      for (int j = 0; j < kBlocks8; j += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, QTile::two_chunks_on(at, step) + j * 8 * QTile::kRowBytes);
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
    const uint32_t at = smem_address(v_shared) + v_at;
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
        ldmatrix_x4_trans(b, QTile::two_chunks_on(at, d / 2) + j * 8 * QTile::kRowBytes);
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
