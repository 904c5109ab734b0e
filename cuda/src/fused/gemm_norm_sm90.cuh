// GEMM with LayerNorm or RMSNorm behind it: out = norm(a b + bias + residual) * scale + shift, rows of up to eight tiles.
//
// The blocks of a cluster stand side by side and own whole rows: block r computes columns [r kColumns, (r + 1) kColumns). They
// share each tile of A: a different one loads it into all of them every step. Otherwise blocks work as in gemm_sm90.cuh, ping-pong.
//
// Sums stay in the accumulators, in fp32. A warp reduces its columns of each of its rows to their mean and the sum of squares of what is left
// (both exactly as one pass after the other over the registers gives them), and sends both to the warps that hold the same
// rows in the other blocks, whose barriers count the bytes. Every warp then merges what it got in the order of blocks
// (Chan, Golub, LeVeque 1979): nothing cancels, all blocks find the same numbers, and runs repeat bit for bit.
#pragma once
#include "fused/gemm_sm90.cuh"

namespace stof::sm90 {

constexpr int kNormBlocks = 8;  // of a cluster, at most

struct GemmNormArgs : GemmArgs {
  CUtensorMap sum;  // where a b + bias + residual goes too
  const void *scale, *shift;  // null: 1, 0
  float epsilon;
  bool rms, keep_sum;
};

template <class Element, int kBands_, int kColumns_, int kStages_, int kBuffers_>
struct GemmNormConfig : GemmConfig<Element, kBands_, kColumns_, kStages_, 1, true, false, kBuffers_> {
  using Base = GemmConfig<Element, kBands_, kColumns_, kStages_, 1, true, false, kBuffers_>;
  static constexpr bool kShares = true;
  static constexpr int kThreadRows = 2 * kBands_;      // rows that a thread holds parts of
  static constexpr int kWarpRows = 8 * kThreadRows;
  static constexpr int kStatsBytes = kNormBlocks * kWarpRows * 8;  // of a warp: (mean, squares) [block][row]
  static constexpr int kStatsAt = (Base::kResidualAt + 8 * 8 * kBuffers_ + 15) / 16 * 16;  // of 8 warps, two in turn each
  static constexpr int kStatsFullAt = kStatsAt + 16 * kStatsBytes;
  static constexpr int kVectorsAt = kStatsFullAt + 16 * 8;  // bias, scale, shift of the block's columns
  static constexpr int kSharedBytes = kVectorsAt + 3 * 2 * kColumns_ + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Two numbers into the shared memory of block `block`, where `barrier` counts their bytes.
__device__ __forceinline__ void send(uint32_t address, uint32_t barrier, uint32_t block, float x, float y) {
  asm volatile(
      "{\n.reg .b32 to, full;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 full, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [full];\n}\n" ::"r"(address),
      "r"(barrier), "r"(block), "f"(x), "f"(y)
      : "memory");
}

__device__ __forceinline__ float2 shared_read2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t shared_read(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// One thread.
template <class C>
__device__ __forceinline__ void norm_produce(const GemmArgs& a, uint32_t shared, int rank) {
  Ring<C::kStages> ring;
  int turn = 0;  // the block that loads A
  for (int tile = blockIdx.x / a.cluster; tile < a.tiles; tile += gridDim.x / a.cluster) {
    for (int step = 0; step < a.steps; ++step) {
      barrier_wait(shared + C::kEmptyAt + 8 * ring.stage, ring.phase ^ 1);
      const uint32_t full = shared + C::kFullAt + 8 * ring.stage;
      barrier_arrive_expect(full, C::kStageBytes);
      if (turn == rank) {
        tma_load_multicast(shared + C::kAAt + ring.stage * C::kABytes, &a.a, full, step * kGemmStep, tile * C::kRows,
                           (1 << a.cluster) - 1);
      }
      if (++turn == a.cluster) turn = 0;
#pragma unroll
      for (int block = 0; block < C::kColumns / 64; ++block) {
        tma_load(shared + C::kBAt + ring.stage * C::kBBytes + block * C::kBlockBytes, &a.b, full,
                 rank * C::kColumns + block * 64, step * kGemmStep);
      }
      ring.advance();
    }
  }
}

// One consumer warpgroup.
template <class C>
struct GemmNormConsumer : GemmConsumer<C> {
  using Element = typename C::Element;
  using GemmConsumer<C>::acc;
  using GemmConsumer<C>::args;
  using GemmConsumer<C>::lane;
  using GemmConsumer<C>::rank;
  using GemmConsumer<C>::ring;
  using GemmConsumer<C>::shared;
  using GemmConsumer<C>::warpgroup;
  using GemmConsumer<C>::warp;
  const GemmNormArgs& norm;
  // Of one row: lane r of a quad holds those of the row 64 (r / 2) + 8 (r % 2) below the quad's first.
  float mean, factor;

  __device__ __forceinline__ int columns(int block) const { return min(args.n - block * C::kColumns, C::kColumns); }

  // Two neighbours of vector `index` (bias, scale, shift) in group `j` of 8 columns.
  __device__ __forceinline__ float2 vector(int index, int j) const {
    return unpack<Element>(shared_read(shared + C::kVectorsAt + 2 * (index * C::kColumns + 8 * j + lane % 4 * 2)));
  }

  __device__ __forceinline__ float* chunk_of(int chunk) {
    return acc + chunk / C::kColumnChunks * C::kAccumulators + chunk % C::kColumnChunks * 32;
  }

  // Adds bias and residual to the products.
  __device__ __forceinline__ void add_up(GemmPlace tile) {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      float v[32];
      float* const from = chunk_of(chunk);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 b = vector(0, chunk % C::kColumnChunks * 8 + j);
        v[4 * j] = from[4 * j] + b.x;
        v[4 * j + 1] = from[4 * j + 1] + b.y;
        v[4 * j + 2] = from[4 * j + 2] + b.x;
        v[4 * j + 3] = from[4 * j + 3] + b.y;
      }
      if (args.has_residual) this->add_residual(v, chunk);
      if (norm.keep_sum) {
        if (!args.has_residual && lane == 0) bulk_wait_read<C::kBuffers - 1>();
        __syncwarp();
        uint32_t words[16];
        this->pack_all(v, words);
        this->store_chunk(words, chunk, tile, &norm.sum);
      }
      if (args.has_residual && chunk + C::kBuffers < C::kChunks) {
        __syncwarp();
        if (lane == 0) {
          bulk_wait_read();
          this->load_residual(chunk + C::kBuffers, tile);
        }
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) from[i] = v[i];
    }
  }

  // This block's part of row `r`: its mean (0 for RMSNorm) and the sum of squared differences from it.
  __device__ __forceinline__ float2 reduce(int r) const {
    const float* const row = acc + r / 2 * C::kAccumulators + r % 2 * 2;
    const int width = columns(rank);
    float center = 0.0f, squares = 0.0f;
    if (!norm.rms) {
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) center += row[4 * j] + row[4 * j + 1];  // 0 beyond the last column
      center = quad_sum(center) / width;
    }
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
      const float x = row[4 * j] - center, y = row[4 * j + 1] - center;
      if (8 * j < width) squares = fmaf(x, x, fmaf(y, y, squares));
    }
    return {center, quad_sum(squares)};
  }

  // Of whole rows: mean, and what they are multiplied by. `turn` counts the warpgroup's tiles.
  __device__ __forceinline__ void exchange(int turn) {
    const int slot = (warpgroup * 4 + warp) * 2 + (turn & 1), mine = lane % 4;
    const uint32_t stats = shared + C::kStatsAt + slot * C::kStatsBytes + (lane / 4 * C::kThreadRows + mine) * 8;
    const uint32_t full = shared + C::kStatsFullAt + slot * 8;
    if (lane == 0) barrier_arrive_expect(full, args.cluster * C::kWarpRows * 8);
    float2 part{};
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r) {
      const float2 found = reduce(r);
      if (r == mine) part = found;
    }
    if (mine < C::kThreadRows) {
      for (int block = 0; block < args.cluster; ++block) send(stats + rank * C::kWarpRows * 8, full, block, part.x, part.y);
    }
    barrier_wait(full, turn >> 1 & 1);
    mean = factor = 0.0f;
    if (mine < C::kThreadRows) {
      float squares = 0.0f;
#pragma unroll 1
      for (int block = 0; block < args.cluster; ++block) {
        mean += shared_read2(stats + block * C::kWarpRows * 8).x * columns(block);
      }
      mean /= args.n;
#pragma unroll 1
      for (int block = 0; block < args.cluster; ++block) {
        const float2 p = shared_read2(stats + block * C::kWarpRows * 8);
        squares += p.y + columns(block) * (p.x - mean) * (p.x - mean);
      }
      factor = rsqrtf(squares / args.n + norm.epsilon);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void finish_rows(GemmPlace tile) {
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r) {
      const float m = __shfl_sync(0xffffffffu, mean, r, 4), f = __shfl_sync(0xffffffffu, factor, r, 4);
      float* const row = acc + r / 2 * C::kAccumulators + r % 2 * 2;
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        row[4 * j] = (row[4 * j] - m) * f;
        row[4 * j + 1] = (row[4 * j + 1] - m) * f;
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const float* const from = chunk_of(chunk);
      uint32_t words[16];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 g = vector(1, chunk % C::kColumnChunks * 8 + j), b = vector(2, chunk % C::kColumnChunks * 8 + j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          words[2 * j + h] = pack<Element>(fmaf(from[4 * j + 2 * h], g.x, b.x), fmaf(from[4 * j + 2 * h + 1], g.y, b.y));
        }
      }
      if (lane == 0) bulk_wait_read<C::kBuffers - 1>();
      __syncwarp();
      this->store_chunk(words, chunk, tile, &args.out);
    }
  }

  __device__ __forceinline__ void run() {
    const int stride = gridDim.x / args.cluster;
    int index = blockIdx.x / args.cluster, turn = 0;
    if (warpgroup == 1) {
      index += stride;
      ring.advance(args.steps);
    }
    for (bool first = warpgroup == 0; index < args.tiles; index += 2 * stride, first = false, ++turn) {
      const GemmPlace place{index * C::kRows, rank * C::kColumns};
      // As in GemmConsumer: the other warpgroup has issued its products.
      if (!first) named_barrier_sync(1 + warpgroup, 256);
      this->multiply(place, first);
      if (index + stride < args.tiles) named_barrier_arrive(2 - warpgroup, 256);
      wgmma_wait<0>();
      pin(acc);
      this->release(this->last);
      ring.advance(args.steps);
      add_up(place);
      exchange(turn);
      finish_rows(place);
    }
    if (lane == 0) bulk_wait_read();
  }
};

// Bias, scale and shift of the block's columns into shared memory, by all threads.
template <class C>
__device__ __forceinline__ void load_vectors(const GemmNormArgs& a, uint8_t* base, int rank) {
  using Element = typename C::Element;
  Element* const to = reinterpret_cast<Element*>(base + C::kVectorsAt);
  for (int i = threadIdx.x; i < 3 * C::kColumns; i += kGemmThreads) {
    const int which = i / C::kColumns, column = rank * C::kColumns + i % C::kColumns;
    const Element* const from = static_cast<const Element*>(which == 0 ? a.bias : which == 1 ? a.scale : a.shift);
    to[i] = from != nullptr && column < a.n ? from[column] : Element(which == 1 ? 1.0f : 0.0f);
  }
}

template <class C>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm_norm_sm90_kernel(const __grid_constant__ GemmNormArgs args) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (smem_address(raw) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared + C::kFullAt + 8 * s, 1);
      barrier_init(shared + C::kEmptyAt + 8 * s, 4 * args.cluster);
    }
    for (int i = 0; i < 8 * C::kBuffers; ++i) barrier_init(shared + C::kResidualAt + 8 * i, 1);
    for (int i = 0; i < 16; ++i) barrier_init(shared + C::kStatsFullAt + 8 * i, 1);
    barrier_init_fence();
    prefetch_map(&args.a);
    prefetch_map(&args.b);
    prefetch_map(&args.out);
  }
  load_vectors<C>(args, raw + (shared - smem_address(raw)), rank);
  // No block may be written to before its barriers are there.
  __syncthreads();
  cluster_sync();
  if (warpgroup == 0) {
    registers_shrink<24>();
    if (warp == 0) {
      if (threadIdx.x == 0) norm_produce<C>(args, shared, rank);
      __syncwarp();
    }
  } else {
    registers_grow<240>();
    const int lane = threadIdx.x % 32;
    const uint32_t matrix_offset = lane % 16 * 128 + (((lane / 16) ^ (lane % 8)) * 16);
    GemmNormConsumer<C> consumer{{args, shared, warpgroup - 1, warp, lane, rank, matrix_offset}, args};
    consumer.run();
  }
  // No block may end before its neighbours' copies and arrivals have reached it.
  cluster_sync();
}

}  // namespace stof::sm90
