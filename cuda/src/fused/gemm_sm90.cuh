// GEMM with a fused epilogue for Hopper: TMA loads, WGMMA products with both operands in shared memory, warp-specialised,
// persistent.
//
// A block is one producer warp and two consumer warpgroups. Output tiles are kBands x 64 rows a warpgroup:
//   cooperative  both warpgroups share a tile, one below the other, and every step of B; the second one runs a few steps behind, and
//                the stores of a tile are spread over the first steps of the next
//   ping-pong    each has tiles of its own, and takes turns at the tensor cores: one's epilogue runs beside the other's products
// A gated tile is a plain one whose first half of columns comes from b and whose second half comes from b2: both factors of
// an output element land in the same thread.
//
// In a cluster of kCluster blocks, neighbours along m share their tile of B: each loads its part of it into all of them.
//
// Shared memory holds tiles of 64 16-bit elements a row, swizzled by 128 bytes: A as [m][k], B as [k][n], 64 columns after 64
// columns. Each consumer warp carries its own 16 rows out (and the residual in), 64 columns at a time.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "fused/activation.cuh"
#include "fused/rotation.cuh"
#include "sm90/barrier.cuh"
#include "sm90/fragments.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace stof::sm90 {

constexpr int kGemmStep = 64;    // of k, a stage
constexpr int kChunk = 64;       // columns that leave at a time
constexpr int kSlabBytes = 16 * kChunk * 2;
constexpr int kGemmThreads = 3 * 128;

struct GemmArgs {
  CUtensorMap a, b, b2, residual, out;
  const void *bias, *bias2;  // null: none
  const void* residual_data;  // the same as the maps, for kernels that need none
  void* out_data;
  int64_t stride_residual, stride_out;
  int32_t m, n, steps;
  int32_t clusters_m, tiles_n, tiles;  // tiles of a whole cluster
  int32_t group;                       // clusters along m that walk along n together
  int32_t cluster;                     // blocks of a cluster
  Activation activation;
  bool has_residual;
  Rotation rotation;
};

template <class Element_, int kBands_, int kColumns_, int kStages_, int kCluster_, bool kPingPong_, bool kGated_,
          int kBuffers_>
struct GemmConfig {
  using Element = Element_;
  static constexpr int kBands = kBands_;      // of 64 rows, a warpgroup
  static constexpr int kColumns = kColumns_;  // of B in a tile; a gated tile has half as many of the output
  static constexpr int kStages = kStages_;
  static constexpr int kCluster = kCluster_;
  static constexpr bool kShares = kCluster > 1;  // blocks of a cluster write to each other's stages
  static constexpr bool kPingPong = kPingPong_;
  static constexpr bool kGated = kGated_;
  static constexpr int kBuffers = kBuffers_;  // chunks of a warp on their way out
  static constexpr int kRows = kBands * 64 * (kPingPong ? 1 : 2);
  static constexpr int kOutColumns = kGated ? kColumns / 2 : kColumns;
  static constexpr int kAccumulators = kColumns / 2;  // of a band
  static constexpr int kLag = kStages / 2;  // steps that the second cooperative warpgroup stays behind the first
  static constexpr int kColumnChunks = kOutColumns / kChunk;
  static constexpr int kChunks = kBands * kColumnChunks;
  static constexpr bool kWholeTile = kBuffers == kChunks;  // the buffers hold all of a warp's part of a tile
  static constexpr int kBlockBytes = kGemmStep * 64 * 2;  // 64 columns of B, or rows of A
  static constexpr int kABytes = kRows * kGemmStep * 2;
  static constexpr int kBBytes = kColumns * kGemmStep * 2;
  static constexpr int kStageBytes = kABytes + kBBytes;

  static constexpr int kAAt = 0;
  static constexpr int kBAt = kStages * kABytes;
  static constexpr int kBufferAt = kBAt + kStages * kBBytes;
  static constexpr int kFullAt = kBufferAt + 8 * kBuffers * kSlabBytes;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kResidualAt = kEmptyAt + 8 * kStages;  // barriers, one a warp and buffer
  static constexpr int kSharedBytes = kResidualAt + 8 * 8 * kBuffers + 1024;  // aligned to 1024 bytes
  static_assert(kSharedBytes <= 227 * 1024 && kChunks % kBuffers == 0);
  static_assert(kColumns / 64 % kCluster == 0, "each block of a cluster loads its part of B");
  static_assert(kBands * kAccumulators <= 192);
};

struct GemmTile {
  int m, n;
};

// First row and column of a warpgroup's part of a tile.
struct GemmPlace {
  int row, column;
};

// Cluster rows in groups; within a group all rows of a column, then the next column: what runs at a time reads few tiles of A and B.
__device__ __forceinline__ GemmTile gemm_tile(const GemmArgs& a, int index) {
  const int per_group = a.group * a.tiles_n;
  const int group = index / per_group;
  const int first = group * a.group;
  const int rows = min(a.group, a.clusters_m - first);
  index -= group * per_group;
  const int n = index / rows;
  return {first + index - n * rows, n};
}

// One thread.
template <class C>
__device__ __forceinline__ void gemm_produce(const GemmArgs& a, uint32_t shared, int rank) {
  Ring<C::kStages> ring;
  for (int index = blockIdx.x / C::kCluster; index < a.tiles; index += gridDim.x / C::kCluster) {
    const GemmTile tile = gemm_tile(a, index);
    const int row = (tile.m * C::kCluster + rank) * C::kRows, column = tile.n * C::kOutColumns;
    for (int step = 0; step < a.steps; ++step) {
      barrier_wait(shared + C::kEmptyAt + 8 * ring.stage, ring.phase ^ 1);
      const uint32_t full = shared + C::kFullAt + 8 * ring.stage;
      barrier_arrive_expect(full, C::kStageBytes);
      tma_load(shared + C::kAAt + ring.stage * C::kABytes, &a.a, full, step * kGemmStep, row);
      constexpr int kBlocks = C::kColumns / 64, kMine = kBlocks / C::kCluster;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int block = rank * kMine + i;
        const bool second = C::kGated && block >= kBlocks / 2;
        const int at = column + (second ? block - kBlocks / 2 : block) * 64;
        const uint32_t smem = shared + C::kBAt + ring.stage * C::kBBytes + block * C::kBlockBytes;
        const CUtensorMap* const map = second ? &a.b2 : &a.b;
        if constexpr (C::kCluster > 1) {
          tma_load_multicast(smem, map, full, at, step * kGemmStep, (1 << C::kCluster) - 1);
        } else {
          tma_load(smem, map, full, at, step * kGemmStep);
        }
      }
      ring.advance();
    }
  }
}

template <Activation kActivation>
__device__ __forceinline__ void activate_all(float (&v)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] = activate<kActivation>(v[i]);
}

__device__ __forceinline__ void activate_all(float (&v)[32], Activation activation) {
  switch (activation) {
    case Activation::kNone: break;
    case Activation::kRelu: activate_all<Activation::kRelu>(v); break;
    case Activation::kGeluErf: activate_all<Activation::kGeluErf>(v); break;
    case Activation::kGeluTanh: activate_all<Activation::kGeluTanh>(v); break;
    case Activation::kSilu: activate_all<Activation::kSilu>(v); break;
  }
}

__device__ __forceinline__ uint32_t global_read(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (__is_same(Element, __half)) return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
}

// One consumer warpgroup.
template <class C>
struct GemmConsumer {
  const GemmArgs& args;
  const uint32_t shared;
  const int warpgroup, warp, lane, rank;
  const uint32_t matrix_offset;  // of this lane's row of an 8 x 8 matrix in a swizzled slab, for ldmatrix and stmatrix alike
  float acc[C::kBands * C::kAccumulators];
  uint32_t bias[C::kColumns / 8];  // of this thread's columns, two a word
  uint32_t packed[C::kPingPong ? 1 : C::kChunks * 16];  // finished elements that are still to be stored, two a word
  GemmPlace packed_place{-1, 0};
  Ring<C::kStages> ring;
  int last = 0;                  // the stage that the last products read
  uint32_t residual_phases = 0;  // a bit a buffer

  __device__ __forceinline__ uint32_t buffer(int i) const {
    return shared + C::kBufferAt + ((warpgroup * 4 + warp) * C::kBuffers + i) * kSlabBytes;
  }
  __device__ __forceinline__ uint32_t residual_barrier(int i) const {
    return shared + C::kResidualAt + ((warpgroup * 4 + warp) * C::kBuffers + i) * 8;
  }
  // This warp's part of a chunk.
  __device__ __forceinline__ GemmPlace slab(GemmPlace tile, int chunk) const {
    return {tile.row + chunk / C::kColumnChunks * 64 + warp * 16, tile.column + chunk % C::kColumnChunks * kChunk};
  }

  __device__ __forceinline__ void release(int stage) const {
    if constexpr (C::kShares) {
      if (lane < args.cluster) barrier_arrive_at(shared + C::kEmptyAt + 8 * stage, lane);
    } else {
      if (lane == 0) barrier_arrive(shared + C::kEmptyAt + 8 * stage);
    }
  }

  // From `column` on; zeros beyond the last column, and where there is no bias.
  __device__ __forceinline__ void load_bias(int column) {
    constexpr int kFirst = C::kOutColumns / 8;
    const int at = column + lane % 4 * 2;
    read_bias<0, kFirst>(args.bias, at);
    if constexpr (C::kGated) read_bias<kFirst, kFirst>(args.bias2, at);
  }
  template <int kAt, int kWords>
  __device__ __forceinline__ void read_bias(const void* source, int at) {
    const int left = source != nullptr ? args.n - at : 0;
    const auto* const from = reinterpret_cast<const uint32_t*>(static_cast<const char*>(source) + 2 * int64_t{at});
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bias[kAt + i] = 0;
      if (8 * i < left) bias[kAt + i] = global_read(from + 4 * i);
    }
  }

  // By lane 0, once the stores that read the buffer are done with it.
  __device__ __forceinline__ void load_residual(int chunk, GemmPlace tile) const {
    const uint32_t barrier = residual_barrier(chunk % C::kBuffers);
    const GemmPlace at = slab(tile, chunk);
    barrier_arrive_expect(barrier, kSlabBytes);
    tma_load(buffer(chunk % C::kBuffers), &args.residual, barrier, at.column, at.row);
  }

  // acc = the tile's products.
  __device__ __forceinline__ void multiply(GemmPlace tile, bool first) {
    using Product = Wgmma<typename C::Element, true, C::kColumns>;
    const uint32_t a_offset = C::kPingPong ? 0 : warpgroup * C::kBands * C::kBlockBytes;
    int previous = 0;
    for (int step = 0; step < args.steps; ++step) {
      barrier_wait(shared + C::kFullAt + 8 * ring.stage, ring.phase);
      const uint32_t a = tile_descriptor_low(shared + C::kAAt + ring.stage * C::kABytes + a_offset, 0);
      const uint32_t b = tile_descriptor_low(shared + C::kBAt + ring.stage * C::kBBytes, C::kBlockBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kGemmStep / 16; ++k) {
#pragma unroll
        for (int band = 0; band < C::kBands; ++band) {
          Product::ss(acc + band * C::kAccumulators, descriptor(a + band * (C::kBlockBytes >> 4) + k * (32 >> 4)),
                      descriptor(b + k * (16 * 128 >> 4)), step > 0 || k > 0);
        }
      }
      wgmma_commit();
      if constexpr (!C::kPingPong) {
        if (first && warpgroup == 0 && step == min(C::kLag, args.steps - 1)) named_barrier_arrive(3, 256);
        store_packed(step);
      }
      // The first products run while the last tile's stores leave the buffers.
      if (step == kResidualStep) load_residuals(tile);
      if (step > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = ring.stage;
      ring.advance();
    }
    last = previous;
    if constexpr (!C::kPingPong) store_rest(args.steps);
    if (args.steps <= kResidualStep) load_residuals(tile);
  }

  // The step of a tile from which on its residual may be loaded: the stores of the last tile have been issued.
  static constexpr int kResidualStep = !C::kPingPong && C::kWholeTile ? C::kChunks : 0;

  __device__ __forceinline__ void load_residuals(GemmPlace tile) const {
    if (C::kGated || !args.has_residual) return;
    if (lane == 0) {
      bulk_wait_read();
      for (int i = 0; i < C::kBuffers; ++i) load_residual(i, tile);
    }
    __syncwarp();
  }

  // Chunk `chunk` of the finished tile, if there is one.
  __device__ __forceinline__ void store_packed(int chunk) {
    if (packed_place.row < 0) return;
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
      if (i != chunk) continue;
      if (lane == 0) bulk_wait_read<C::kBuffers - 1>();
      __syncwarp();
      store_chunk(packed + i * 16, i, packed_place, &args.out);
    }
  }

  // What is left of it after `steps` steps of the next.
  __device__ __forceinline__ void store_rest(int steps) {
    for (int chunk = steps; chunk < C::kChunks; ++chunk) store_packed(chunk);
    packed_place.row = -1;
  }

  // A chunk's packed elements leave through its buffer, which is free.
  __device__ __forceinline__ void store_chunk(const uint32_t* from, int chunk, GemmPlace tile, const CUtensorMap* map) const {
    const uint32_t to = buffer(chunk % C::kBuffers);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrices((to + matrix_offset) ^ (j * 32), from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]);
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      const GemmPlace at = slab(tile, chunk);
      tma_store(map, to, at.column, at.row);
      bulk_commit();
    }
  }

  // Bias, activation, gate and rotation of a chunk, in fp32.
  __device__ __forceinline__ void finish(float (&v)[32], int chunk, GemmPlace tile) const {
    const int c = chunk % C::kColumnChunks;
    const float* const from = acc + chunk / C::kColumnChunks * C::kAccumulators + c * 32;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 b = unpack<typename C::Element>(bias[c * 8 + j]);
      v[4 * j] = from[4 * j] + b.x;
      v[4 * j + 1] = from[4 * j + 1] + b.y;
      v[4 * j + 2] = from[4 * j + 2] + b.x;
      v[4 * j + 3] = from[4 * j + 3] + b.y;
    }
    activate_all(v, args.activation);
    if constexpr (!C::kGated) rotate(v, slab(tile, chunk));
    if constexpr (C::kGated) {
      const float* const factor = from + C::kAccumulators / 2;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 b = unpack<typename C::Element>(bias[C::kColumns / 16 + c * 8 + j]);
        v[4 * j] *= factor[4 * j] + b.x;
        v[4 * j + 1] *= factor[4 * j + 1] + b.y;
        v[4 * j + 2] *= factor[4 * j + 2] + b.x;
        v[4 * j + 3] *= factor[4 * j + 3] + b.y;
      }
    }
  }

  __device__ __forceinline__ void rotate(float (&v)[32], GemmPlace at) const {
    const Rotation& rotation = args.rotation;
    if (at.column >= rotation.columns) return;
    const int column = at.column + lane % 4 * 2;
    const float2* const upper = rotation.row(at.row + lane / 4);
    const float2* const lower = rotation.row(at.row + lane / 4 + 8);
    int within = column % rotation.head_dim;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + 8 * j < rotation.columns) {
        rotate_pair(v[4 * j], v[4 * j + 1], __ldg(upper + within / 2));
        rotate_pair(v[4 * j + 2], v[4 * j + 3], __ldg(lower + within / 2));
      }
      within += 8;
      if (within >= rotation.head_dim) within -= rotation.head_dim;
    }
  }

  __device__ __forceinline__ void pack_all(const float (&v)[32], uint32_t* to) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = pack<typename C::Element>(v[2 * i], v[2 * i + 1]);
  }

  __device__ __forceinline__ void add_residual(float (&v)[32], int chunk) {
    const int b = chunk % C::kBuffers;
    barrier_wait(residual_barrier(b), residual_phases >> b & 1);
    residual_phases ^= 1u << b;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t r[4];
      load_matrices(r, (buffer(b) + matrix_offset) ^ (j * 32));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack<typename C::Element>(r[i]);
        v[8 * j + 2 * i] += x.x;
        v[8 * j + 2 * i + 1] += x.y;
      }
    }
  }

  // Finishes the tile and stores it at once.
  __device__ __forceinline__ void store(GemmPlace tile) {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      float v[32];
      uint32_t words[16];
      finish(v, chunk, tile);
      const bool residual = !C::kGated && args.has_residual;
      if (residual) {
        add_residual(v, chunk);
      } else {
        if (lane == 0) bulk_wait_read<C::kBuffers - 1>();
      }
      pack_all(v, words);
      __syncwarp();
      store_chunk(words, chunk, tile, &args.out);
      if (residual && chunk + C::kBuffers < C::kChunks && lane == 0) {
        bulk_wait_read();
        load_residual(chunk + C::kBuffers, tile);
      }
      __syncwarp();
    }
  }

  // Finishes the tile; the next one's steps store it.
  __device__ __forceinline__ void keep(GemmPlace tile) {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      float v[32];
      finish(v, chunk, tile);
      if (!C::kGated && C::kWholeTile && args.has_residual) add_residual(v, chunk);
      pack_all(v, packed + chunk * 16);
    }
    packed_place = tile;
  }

  __device__ __forceinline__ void run() {
    const int stride = gridDim.x / C::kCluster;
    int index = blockIdx.x / C::kCluster;
    bool first = true;
    if (C::kPingPong && warpgroup == 1) {
      index += stride;
      ring.advance(args.steps);
      first = false;
    }
    if (!C::kPingPong && warpgroup == 1) named_barrier_sync(3, 256);  // see kLag
    for (; index < args.tiles; index += C::kPingPong ? 2 * stride : stride) {
      const GemmTile tile = gemm_tile(args, index);
      const GemmPlace place{(tile.m * C::kCluster + rank) * C::kRows + (C::kPingPong ? 0 : warpgroup * C::kBands * 64),
                            tile.n * C::kOutColumns};
      // Named barrier 1 + w lets warpgroup w go on to its products: the other arrives once it has issued its own.
      if (C::kPingPong && !first) named_barrier_sync(1 + warpgroup, 256);
      multiply(place, first);
      first = false;
      if (C::kPingPong && index + stride < args.tiles) named_barrier_arrive(2 - warpgroup, 256);
      load_bias(place.column);
      wgmma_wait<0>();
      pin(acc);
      release(last);
      if (C::kPingPong) ring.advance(args.steps);
      if (C::kPingPong || (!C::kWholeTile && args.has_residual)) {
        store(place);
#pragma unroll
        for (uint32_t& word : packed) word = 0;  // not live until here, as far as the compiler can tell
      } else {
        keep(place);
      }
    }
    if constexpr (!C::kPingPong) store_rest(0);
    if (lane == 0) bulk_wait_read();
  }
};

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(kGemmThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (smem_address(raw) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const int rank = C::kCluster > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared + C::kFullAt + 8 * s, 1);
      barrier_init(shared + C::kEmptyAt + 8 * s, C::kCluster * (C::kPingPong ? 4 : 8));
    }
    for (int i = 0; i < 8 * C::kBuffers; ++i) barrier_init(shared + C::kResidualAt + 8 * i, 1);
    barrier_init_fence();
    prefetch_map(&args.a);
    prefetch_map(&args.b);
    prefetch_map(&args.out);
  }
  // No block may be written to before its barriers are there.
  if constexpr (C::kCluster > 1) cluster_sync();
  else __syncthreads();
  if (warpgroup == 0) {
    registers_shrink<24>();
    if (warp == 0) {
      if (threadIdx.x == 0) gemm_produce<C>(args, shared, rank);
      __syncwarp();
    }
  } else {
    registers_grow<240>();
    const int lane = threadIdx.x % 32;
    const uint32_t matrix_offset = lane % 16 * 128 + (((lane / 16) ^ (lane % 8)) * 16);
    GemmConsumer<C> consumer{args, shared, warpgroup - 1, warp, lane, rank, matrix_offset};
    consumer.run();
  }
  // No block may end before its neighbours' copies and arrivals have reached it.
  if constexpr (C::kCluster > 1) cluster_sync();
}

}  // namespace stof::sm90
