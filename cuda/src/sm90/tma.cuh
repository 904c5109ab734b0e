// The bulk copy engine: tiles of 4-D tensors (d, s, h, b) and of matrices through tensor maps, and plain blocks of bytes.
#pragma once
#include <cstdint>
#include <cuda.h>

namespace stof::sm90 {

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the map's box at (d, s, h, b) to `smem`; its bytes complete on `barrier`. Elements out of range arrive as zero.
__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int d, int s, int h,
                                         int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b)
      : "memory");
}

// Stores the map's box from `smem`; what lies out of range is dropped.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t smem, int d, int s, int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem), "r"(d), "r"(s), "r"(h), "r"(b)
               : "memory");
}

// The map's box at (column, row) of a matrix.
__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same into the blocks of `blocks` (a bit each) of the cluster, at the same offsets of each; completes on each one's barrier.
__device__ __forceinline__ void tma_load_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int column,
                                                   int row, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t smem, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(smem),
               "r"(column), "r"(row)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the last kPending committed groups of this thread's stores have finished reading shared memory.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All of this thread's stores are complete.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// `bytes` (a multiple of 16) from 16-byte-aligned global memory.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace stof::sm90
