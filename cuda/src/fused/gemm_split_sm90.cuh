// GEMM for few rows: the blocks of a cluster share one 128 x 64 tile and split its sum over k, since there are too few tiles to
// fill the chip. Each then adds up all partial sums of its own columns, in a fixed order, through the others' shared memory.
#pragma once
#include "fused/gemm_sm90.cuh"

namespace stof::sm90 {

template <class Element_, int kSplit_>
struct GemmSplitConfig {
  using Element = Element_;
  static constexpr int kSplit = kSplit_;  // blocks of a cluster
  static constexpr int kRows = 128, kColumns = 64, kStages = 6;
  static constexpr int kAccumulators = kColumns / 2;
  static constexpr int kShare = kColumns / 8 / kSplit;  // groups of 8 columns that a block finishes
  static constexpr int kABytes = kRows * kGemmStep * 2, kBBytes = kColumns * kGemmStep * 2;
  static constexpr int kAAt = 0;
  static constexpr int kBAt = kStages * kABytes;
  static constexpr int kPartialAt = kBAt + kStages * kBBytes;  // float4 [8 columns][256 threads]
  static constexpr int kFullAt = kPartialAt + kRows * kColumns * 4;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kSharedBytes = kEmptyAt + 8 * kStages + 1024;  // aligned to 1024 bytes
  static_assert(kSharedBytes <= 227 * 1024 && kShare >= 1);
};

__device__ __forceinline__ float4 cluster_read4(uint32_t address, uint32_t block) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}

__device__ __forceinline__ float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kRelu: return activate<Activation::kRelu>(x);
    case Activation::kGeluErf: return activate<Activation::kGeluErf>(x);
    case Activation::kGeluTanh: return activate<Activation::kGeluTanh>(x);
    case Activation::kSilu: return activate<Activation::kSilu>(x);
  }
  return x;
}

template <class C>
__device__ __forceinline__ void split_produce(const GemmArgs& a, uint32_t shared, int row, int column, int first, int end) {
  Ring<C::kStages> ring;
  for (int step = first; step < end; ++step) {
    barrier_wait(shared + C::kEmptyAt + 8 * ring.stage, ring.phase ^ 1);
    const uint32_t full = shared + C::kFullAt + 8 * ring.stage;
    barrier_arrive_expect(full, C::kABytes + C::kBBytes);
    tma_load(shared + C::kAAt + ring.stage * C::kABytes, &a.a, full, step * kGemmStep, row);
    tma_load(shared + C::kBAt + ring.stage * C::kBBytes, &a.b, full, column, step * kGemmStep);
    ring.advance();
  }
}

// Leaves the partial sums of steps [first, end) in this block's shared memory.
template <class C>
__device__ __forceinline__ void split_multiply(uint32_t shared, int first, int end) {
  using Product = Wgmma<typename C::Element, true, C::kColumns>;
  const int thread = threadIdx.x - 128, warpgroup = thread / 128;
  float acc[C::kAccumulators] = {};
  Ring<C::kStages> ring;
  for (int step = first; step < end; ++step) {
    barrier_wait(shared + C::kFullAt + 8 * ring.stage, ring.phase);
    const uint32_t a = tile_descriptor_low(shared + C::kAAt + ring.stage * C::kABytes + warpgroup * 64 * 128, 0);
    const uint32_t b = tile_descriptor_low(shared + C::kBAt + ring.stage * C::kBBytes, C::kBBytes);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGemmStep / 16; ++k) {
      Product::ss(acc, descriptor(a + k * (32 >> 4)), descriptor(b + k * (16 * 128 >> 4)), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + C::kEmptyAt + 8 * ring.stage);
    ring.advance();
  }
#pragma unroll
  for (int j = 0; j < C::kColumns / 8; ++j) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared + C::kPartialAt + (j * 256 + thread) * 16),
                 "f"(acc[4 * j]), "f"(acc[4 * j + 1]), "f"(acc[4 * j + 2]), "f"(acc[4 * j + 3])
                 : "memory");
  }
}

template <class C>
__device__ __forceinline__ void split_finish(const GemmArgs& a, uint32_t shared, int row, int column, int rank) {
  using Element = typename C::Element;
  const int thread = threadIdx.x - 128;
  row += thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < C::kShare; ++i) {
    const int j = rank * C::kShare + i, at = column + 8 * j + thread % 4 * 2;
    float sum[4] = {};
#pragma unroll
    for (int block = 0; block < C::kSplit; ++block) {
      const float4 part = cluster_read4(shared + C::kPartialAt + (j * 256 + thread) * 16, block);
      sum[0] += part.x;
      sum[1] += part.y;
      sum[2] += part.z;
      sum[3] += part.w;
    }
    if (at >= a.n) continue;
    float2 bias = {};
    if (a.bias != nullptr) bias = unpack<Element>(global_read(static_cast<const uint32_t*>(a.bias) + at / 2));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= a.m) continue;
      float x = activate(sum[2 * h] + bias.x, a.activation), y = activate(sum[2 * h + 1] + bias.y, a.activation);
      if (at < a.rotation.columns) rotate_pair(x, y, __ldg(a.rotation.row(row + 8 * h) + at % a.rotation.head_dim / 2));
      if (a.has_residual) {  // may lie where the output does: read by the thread that writes there
        const Element* const from = static_cast<const Element*>(a.residual_data) + (row + 8 * h) * a.stride_residual + at;
        const float2 r = unpack<Element>(*reinterpret_cast<const uint32_t*>(from));
        x += r.x;
        y += r.y;
      }
      Element* const to = static_cast<Element*>(a.out_data) + (row + 8 * h) * a.stride_out + at;
      *reinterpret_cast<uint32_t*>(to) = pack<Element>(x, y);
    }
  }
}

template <class C>
__global__ void __cluster_dims__(C::kSplit, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_split_sm90_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (smem_address(raw) + 1023) & ~1023u;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared + C::kFullAt + 8 * s, 1);
      barrier_init(shared + C::kEmptyAt + 8 * s, 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const GemmTile tile = gemm_tile(args, blockIdx.x / C::kSplit);
  const int row = tile.m * C::kRows, column = tile.n * C::kColumns;
  const int first = args.steps * rank / C::kSplit, end = args.steps * (rank + 1) / C::kSplit;
  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) split_produce<C>(args, shared, row, column, first, end);
    __syncwarp();
  } else {
    split_multiply<C>(shared, first, end);
  }
  cluster_sync();
  if (threadIdx.x >= 128) split_finish<C>(args, shared, row, column, rank);
  cluster_sync();  // no block may end while others read its sums
}

}  // namespace stof::sm90
