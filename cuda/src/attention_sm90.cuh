// Block-wise attention forward for Hopper: TMA loads, WGMMA products, warp-specialised, persistent.
//
// A work item is (batch, head, row group). A group holds up to kWarpgroups neighbouring bands of 64 query rows, one a
// consumer warpgroup, and one list of key tiles (64 or 128 wide): the union of the bands' own lists. Every tile of it is loaded once
// into a ring in shared memory; a 2-bit code per band says whether that warpgroup skips it, takes it whole, or tests
// its bitmap. A group may instead be one single band with a long list ("split"): then all warpgroups hold the same rows, take
// the tiles in turn and add up their results at the end.
//
// The producer warp runs ahead of the consumers by the depth of the ring, across items. The lowered mask (lower_mask.py):
//   row_order[g]     first band | bands << 20 | split << 23 | even << 24; groups lie in the order in which they are to be run
//   *_row_ptr        indexed by g
//   full_col_idx     key tile, full for every band of the group
//   part_col_idx     key tile | codes << 24, two bits a band: 0 skip, 1 full, 2 part
//   bitmap           per part entry, band, warp of it and 64 keys 32 words: lane l applies bit e to its accumulator e
// "even" says that every tile of the list counts for all warpgroups.
#pragma once
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/barrier.cuh"
#include "sm90/fragments.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace stof::sm90 {

constexpr int kBand = 64;     // query rows of a warpgroup
constexpr int kColumns = 64;  // head elements of a shared-memory tile: rows of 128 bytes
constexpr int kRowBytes = 2 * kColumns;
constexpr int kCodeShift = 24;
constexpr uint32_t kColumnMask = (1u << kCodeShift) - 1;
constexpr int kSharedLimit = 227 * 1024;

// Arrivals of a warp of consumers at a barrier. One lane's will do, after __syncwarp; for racecheck, which follows every lane's own accesses
// to its own arrival only, all lanes arrive (make cuda-racecheck; NOTES_sm90.md).
#ifdef STOF_RACECHECK
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

struct Args {
  CUtensorMap q, k, v, o;
  const int32_t *full_row_ptr, *full_col_idx, *part_row_ptr, *part_col_idx, *row_order, *mask_index;
  const uint32_t* bitmap;
  int32_t index_b, index_h, n_masks, groups, n_full, n_part, split_groups;
  int32_t batch, heads, heads_per_kv, seq_q, seq_kv;
  int32_t items, heads_per_chunk;
  const int32_t* kv_length;  // [batch]; null: every key is there
  int32_t* counter;          // zeroed; null: items are dealt out statically
  float scale_log2;          // scale * log2(e), positive
  float empty_value;         // what a row without keys yields
};

template <class Element_, int kDim_, int kWarpgroups_, int kKeys_, bool kLongLists = true>
struct Config {
  using Element = Element_;
  static constexpr int kKeys = kKeys_;  // of a tile: 64 or 128
  static constexpr int kDim = kDim_;    // both head sizes, rounded up; the tensor maps zero-fill
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kTiles = (kDim + kColumns - 1) / kColumns;
  static constexpr bool kQueryInRegisters = kDim <= 128 && kKeys == 64;
  // Two warpgroups with equal lists issue their products in turn, each beside the other's softmax.
  static constexpr bool kInTurn = kKeys == 128;
  static_assert(!kInTurn || kWarpgroups == 2);
  // Keys and values are given back apart, or by one pair of barriers for both: less to do, good enough for short lists and many stages.
  static constexpr bool kSplitStages = kLongLists;
  // Rows' sums as a product of the probabilities with ones instead of additions: pays where lists are short.
  static constexpr bool kSumsByProduct = kWarpgroups == 3 && !kLongLists;
  static constexpr bool kTwoTiles = kLongLists || kSumsByProduct;  // a turn of the loop
  static constexpr bool kShareQueryOutput = kDim > 128;  // one buffer for Q and for the output on its way out
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 240;
  static constexpr int kBandTileBytes = kBand * kRowBytes;
  static constexpr int kBandBytes = kTiles * kBandTileBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = kTiles * kTileBytes;  // K or V
  static constexpr int kBandBits = kBand * kKeys / 8;      // bytes
  static constexpr int kBitmapBytes = kWarpgroups * kBandBits;
  static constexpr int kOnesBytes = kSumsByProduct ? 8 * 16 * 2 : 0;  // the matrix of ones
  static constexpr int kConsumerArrivals = 4 * kWarpgroups * kArrivalsPerWarp;

  static constexpr int kQueryAt = 0;
  static constexpr int kOutputAt = kShareQueryOutput ? 0 : kWarpgroups * kBandBytes;
  static constexpr int kKeyAt = kOutputAt + kWarpgroups * kBandBytes;
  static constexpr int kFixedBytes = kKeyAt + kOnesBytes + 2048 + 512 + 1024;  // ones, statistics, barriers and headers, alignment
  static constexpr int kStages = [] {
    int fit = (kSharedLimit - kFixedBytes) / (2 * kStageBytes + kBitmapBytes);
    return fit < 8 ? fit : 8;
  }();
  static constexpr int kValueAt = kKeyAt + kStages * kStageBytes;
  static constexpr int kBitmapAt = kValueAt + kStages * kStageBytes;
  static constexpr int kOnesAt = kBitmapAt + kStages * kBitmapBytes;
  static constexpr int kStatisticsAt = kOnesAt + kOnesBytes;
  static constexpr int kKeyFullAt = kStatisticsAt + 2048;
  static constexpr int kKeyEmptyAt = kKeyFullAt + 8 * kStages;
  static constexpr int kValueFullAt = kKeyFullAt + (kSplitStages ? 16 * kStages : 0);
  static constexpr int kValueEmptyAt = kKeyEmptyAt + (kSplitStages ? 16 * kStages : 0);
  static constexpr int kQueryFullAt = kValueEmptyAt + 8 * kStages;
  static constexpr int kQueryEmptyAt = kQueryFullAt + 8;
  static constexpr int kHeaderAt = kQueryEmptyAt + 8;          // 8 words
  static constexpr int kInfoAt = kHeaderAt + 32;               // a word a stage
  static constexpr int kSharedBytes = kInfoAt + 4 * kStages + 1024;
  static_assert(kStages >= 2 && kSharedBytes <= kSharedLimit);
};

__device__ __forceinline__ uint32_t shared_read(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int4 shared_read4(uint32_t address) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void shared_write(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void shared_write4(uint32_t address, int4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ int clamp_index(int value, int low, int high) { return min(max(value, low), high); }

// ---------------------------------------------------------------------------------------------------------- producer
struct Item {
  int group, batch_index, head;
};

// Split groups (long lists) of all heads come first; the rest in chunks of heads whose K and V fit the L2 cache, and within a
// chunk group by group, longest first. A chunk of fewer heads leads: at the end its long groups would have nothing beside them.
__device__ __forceinline__ Item decode_item(const Args& a, int index) {
  int long_items = a.batch * a.heads * a.split_groups;
  int pair, group;
  if (index < long_items) {
    pair = index / a.split_groups;
    group = index - pair * a.split_groups;
  } else {
    index -= long_items;
    const int groups = a.groups - a.split_groups;
    int width = a.batch * a.heads % a.heads_per_chunk;
    int first = 0;
    if (index >= width * groups) {
      first = width;
      width = a.heads_per_chunk;
      first += (index - first * groups) / (width * groups) * width;
    }
    index -= first * groups;
    group = index / width;
    pair = first + index - group * width;
    group += a.split_groups;
  }
  int b = pair / a.heads;
  return {group, b, pair - b * a.heads};
}

template <class C>
__device__ __forceinline__ void produce(const Args& a, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  Ring<C::kStages> ring;
  Ring<1> query;
  int round = 0;
  int index = blockIdx.x;
  for (;;) {
    if (index >= a.items) break;
    Item item = decode_item(a, index);
    int mask = a.mask_index[(a.index_b == 1 ? 0 : item.batch_index) * a.index_h + (a.index_h == 1 ? 0 : item.head)];
    mask = clamp_index(mask, 0, a.n_masks - 1);
    int order = a.row_order[mask * a.groups + item.group];
    int at = mask * (a.groups + 1) + item.group;
    int full_first = clamp_index(a.full_row_ptr[at], 0, a.n_full);
    int full_count = clamp_index(a.full_row_ptr[at + 1], full_first, a.n_full) - full_first;
    int part_first = clamp_index(a.part_row_ptr[at], 0, a.n_part);
    int part_count = clamp_index(a.part_row_ptr[at + 1], part_first, a.n_part) - part_first;
    const int band = order & 0xfffff;
    const int bands = min((order >> 20) & 7, C::kWarpgroups);
    const bool split = (order >> 23) & 1;
    const bool even = C::kInTurn && (order >> 24 & 1) != 0 && bands == C::kWarpgroups && !split;
    const int count = full_count + part_count;
    const int keys = a.kv_length == nullptr ? a.seq_kv : clamp_index(a.kv_length[item.batch_index], 0, a.seq_kv);
    if (bands > 0 && band * kBand < a.seq_q) {
      barrier_wait(shared + C::kQueryEmptyAt, query.phase ^ 1);
      if (lane == 0) {
        const uint32_t header = shared + C::kHeaderAt;
        shared_write4(header, make_int4(count, band, bands | (split ? 8 : 0) | (even ? 16 : 0), item.head));
        shared_write4(header + 16, make_int4(item.batch_index, keys, 0, 0));
        const uint32_t full = shared + C::kQueryFullAt;
        barrier_arrive_expect(full, C::kWarpgroups * C::kBandBytes);
        for (int w = 0; w < C::kWarpgroups; ++w) {
          for (int c = 0; c < C::kTiles; ++c) {
            tma_load(shared + C::kQueryAt + w * C::kBandBytes + c * C::kBandTileBytes, &a.q, full, c * kColumns,
                     (band + (split ? 0 : w)) * kBand, item.head, item.batch_index);
          }
        }
      }
      query.advance();
      const uint32_t valid = (1u << (2 * bands)) - 1;
      const int kv_head = item.head / a.heads_per_kv;
      int turn = 0;
      for (int first = 0; first < count; first += 32) {
        const int mine = first + lane;
        uint32_t entry = 0;
        if (mine < full_count) {
          entry = (a.full_col_idx[full_first + mine] & kColumnMask) | 0x55u << kCodeShift;
        } else if (mine < count) {
          entry = a.part_col_idx[part_first + mine - full_count];
        }
        const int here = min(32, count - first);
        for (int i = 0; i < here; ++i) {
          const uint32_t info = __shfl_sync(0xffffffffu, entry, i);
          const int column = info & kColumnMask;
          uint32_t codes = (info >> kCodeShift) & valid;
          if (split) {
            codes = (codes & 3) << (2 * turn);
            turn = turn + 1 == C::kWarpgroups ? 0 : turn + 1;
          }
          if (column >= (keys + C::kKeys - 1) / C::kKeys) codes = 0;
          if (even && ((codes | codes >> 1) & 5) != 5) codes = 0;  // whatever the arrays hold, these warpgroups stay in step
          const bool part = codes & 0xaau;
          barrier_wait(shared + C::kKeyEmptyAt + 8 * ring.stage, ring.phase ^ 1);
          if (lane == 0) {
            const uint32_t full = shared + C::kKeyFullAt + 8 * ring.stage;
            shared_write(shared + C::kInfoAt + 4 * ring.stage, column | codes << kCodeShift);
            if (codes == 0) {
              barrier_arrive(full);
            } else {
              barrier_arrive_expect(full, (C::kSplitStages ? 1 : 2) * C::kStageBytes + (part ? C::kBitmapBytes : 0));
              for (int c = 0; c < C::kTiles; ++c) {
                tma_load(shared + C::kKeyAt + ring.stage * C::kStageBytes + c * C::kTileBytes, &a.k, full, c * kColumns,
                         column * C::kKeys, kv_head, item.batch_index);
              }
              if (part) {
                const int64_t tile = part_first + first + i - full_count;
                bulk_load(shared + C::kBitmapAt + ring.stage * C::kBitmapBytes,
                          a.bitmap + tile * (C::kBitmapBytes / 4), C::kBitmapBytes, full);
              }
            }
          }
          if constexpr (C::kSplitStages) barrier_wait(shared + C::kValueEmptyAt + 8 * ring.stage, ring.phase ^ 1);
          if (lane == 0) {
            const uint32_t full = shared + C::kValueFullAt + 8 * ring.stage;
            if constexpr (C::kSplitStages) {
              if (codes == 0) {
                barrier_arrive(full);
              } else {
                barrier_arrive_expect(full, C::kStageBytes);
              }
            }
            if (codes != 0) {
              for (int c = 0; c < C::kTiles; ++c) {
                tma_load(shared + C::kValueAt + ring.stage * C::kStageBytes + c * C::kTileBytes, &a.v, full, c * kColumns,
                         column * C::kKeys, kv_head, item.batch_index);
              }
            }
          }
          __syncwarp();
          ring.advance();
        }
      }
    }
    ++round;
    if (a.counter != nullptr) {
      int ticket = 0;
      if (lane == 0) ticket = atomicAdd(a.counter, 1);
      index = gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
    } else {  // back and forth, so that falling work evens out
      index = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
  }
  barrier_wait(shared + C::kQueryEmptyAt, query.phase ^ 1);
  if (lane == 0) {
    shared_write4(shared + C::kHeaderAt, make_int4(-1, 0, 0, 0));
    barrier_arrive(shared + C::kQueryFullAt);
  }
}

// ---------------------------------------------------------------------------------------------------------- consumers
constexpr float kNoMaximum = -1e30f;  // finite, so that masked scores (-inf) stay exp2(-inf) = 0
// Running maxima are raised only where an exponential of a tile reaches 2^8, or, with sums by addition, where a lane's sum of a tile does: then one
// may have. That no one did and the maxima are raised anyhow costs time, not correctness.
constexpr int kSlackLog2 = 8;

struct RowStatistics {
  float maximum[2] = {kNoMaximum, kNoMaximum};  // of scale * log2(e) * score, rows l/4 and l/4 + 8
  // An accumulator of 8 columns, all alike: rows l/4, again, l/4 + 8, again. Sums by addition are in the first of each, of this lane's columns.
  float sum[4] = {};
};

template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], const uint32_t (&bits)[kKeys / 64]) {
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) s[i] = (bits[i / 32] & (1u << (i % 32))) != 0 ? s[i] : -INFINITY;
}

// Raises the running maxima to those of these scores; what has been summed so far must be multiplied by `correction`.
template <class C>
__device__ __forceinline__ void raise_maxima(const float (&s)[C::kKeys / 2], float scale, RowStatistics& rows,
                                             float (&correction)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < C::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float maximum = fmaxf(rows.maximum[r], top * scale);
    correction[r] = exp2_fast(rows.maximum[r] - maximum);
    rows.maximum[r] = maximum;
#pragma unroll
    for (int i = 0; i < (C::kSumsByProduct ? 2 : 1); ++i) rows.sum[2 * r + i] *= correction[r];
  }
}

// Whether one of the packed values, none below zero, reaches the slack (or is NaN). Their bits are ordered as they are, so the largest is found by
// maxima of three, one instruction for both halves; then the limit is moved to the sign bit.
template <class Element, int kCount>
__device__ __forceinline__ bool slack_used_up(const uint32_t (&p)[kCount][4]) {
  constexpr uint32_t kLimit = __is_same(Element, __half) ? (15 + kSlackLog2) << 10 : (127 + kSlackLog2) << 7;
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) top = __vimax3_u16x2(top, p[i / 2][2 * (i % 2)], p[i / 2][2 * (i % 2) + 1]);
  return ((top + (0x8000u - kLimit) * 0x10001u) & 0x80008000u) != 0;
}

// Packs exp2(scale * score - maximum) as the A operand of the output product; unless a product does it, sums them. Returns whether the
// slack is used up; then the results are void.
template <class C>
__device__ __forceinline__ bool exponentials(const float (&s)[C::kKeys / 2], float scale, const RowStatistics& rows,
                                             uint32_t (&p)[C::kKeys / 16][4], float (&sum)[2]) {
  float part[2][2] = {};
#pragma unroll
  for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = s[4 * j + 2 * r + i];
        e[i] = exp2_fast(fmaf(x, scale, -rows.maximum[r]));
        if constexpr (!C::kSumsByProduct) part[r][i] += e[i];
      }
      p[j / 2][2 * (j % 2) + r] = pack<typename C::Element>(e[0], e[1]);
    }
  }
  if constexpr (C::kSumsByProduct) return slack_used_up<typename C::Element>(p);
  bool above = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = part[r][0] + part[r][1];
    above |= !(sum[r] <= static_cast<float>(1 << kSlackLog2));
  }
  return above;
}

template <class C>
struct Consumer {
  using Element = typename C::Element;
  static constexpr int kKeys = C::kKeys;
  static constexpr int kTileBytes = C::kTileBytes;
  static constexpr int kSteps = C::kDim / 16;
  static constexpr int kQueryRegisters = C::kQueryInRegisters ? kSteps : 1;

  const Args& a;
  const uint32_t shared;
  const int warpgroup, warp, lane;
  Ring<C::kStages> ring;
  bool even = false;  // the other warpgroup takes the same tiles
  int remaining = 0, keys = 0, code_shift = 0;
  uint32_t bitmap_offset = 0, query_at = 0;
  const uint32_t key_low = tile_descriptor_low(shared + C::kKeyAt, 16);
  const uint32_t value_low = tile_descriptor_low(shared + C::kValueAt, kTileBytes);

  float scores[kKeys / 2];
  float output[C::kDim / 2];
  using Probabilities = uint32_t[kKeys / 16][4];
  Probabilities even_tile, odd_tile;
  uint32_t query[kQueryRegisters][4];
  RowStatistics rows;

  struct Entry {
    int place;  // `remaining` when it was taken: falls along the list
    int stage;
    uint32_t phase;
    uint32_t code;
    int column;
  };

  // One lane arrives for its warp, after all lanes' reads (of the tile's word and bitmap, of the header): __syncwarp orders those before it.
  __device__ __forceinline__ void arrive_for_warp(uint32_t barrier) {
    __syncwarp();
    if (kArrivalsPerWarp == 32 || lane == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_keys(int stage) {
    if constexpr (C::kSplitStages) arrive_for_warp(shared + C::kKeyEmptyAt + 8 * stage);
  }
  __device__ __forceinline__ void release_values(int stage) { arrive_for_warp(shared + C::kValueEmptyAt + 8 * stage); }
  __device__ __forceinline__ void wait_for_values(const Entry& e) {
    if constexpr (C::kSplitStages) barrier_wait(shared + C::kValueFullAt + 8 * e.stage, e.phase);
  }

  // The next tile of this warpgroup's own list; tiles it skips are given back at once. False at the list's end, or where
  // `remaining` reaches `floor`.
  __device__ __forceinline__ bool next(Entry& e, int floor) {
    while (remaining > floor) {
      e.place = remaining--;
      barrier_wait(shared + C::kKeyFullAt + 8 * ring.stage, ring.phase);
      const uint32_t info = shared_read(shared + C::kInfoAt + 4 * ring.stage);
      e.stage = ring.stage;
      e.phase = ring.phase;
      e.code = (info >> code_shift) & 3;
      e.column = info & kColumnMask;
      ring.advance();
      if (e.code != 0) return true;
      wait_for_values(e);  // giving them back any sooner could count for the tile that had this place before
      release_keys(e.stage);
      release_values(e.stage);
    }
    return false;
  }

  // How far this warpgroup may look ahead while it holds the values of `e`: a tile further on needs the very place in the ring that they
  // occupy, so waiting for it would never end.
  __device__ __forceinline__ static int reach(const Entry& e) { return max(0, e.place - C::kStages); }

  // What all lanes hold, as something that the compiler knows to be the same for all: descriptors are then computed by the scalar unit. The
  // largest head size has no register to spare for it.
  __device__ __forceinline__ static int uniform(int value) {
    return C::kDim <= 192 ? __shfl_sync(0xffffffffu, value, 0) : value;
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    const uint64_t key = descriptor(key_low + uniform(stage) * (C::kStageBytes / 16));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t b = key + (k / 4) * (kTileBytes / 16) + (k % 4) * 2;
      if constexpr (C::kQueryInRegisters) {
        Wgmma<Element, false, kKeys>::rs(scores, query[k], b, k > 0);
      } else {
        const uint64_t q = descriptor(tile_descriptor_low(query_at, 16));
        Wgmma<Element, false, kKeys>::ss(scores, q + (k / 4) * (C::kBandTileBytes / 16) + (k % 4) * 2, b, k > 0);
      }
    }
  }

  __device__ __forceinline__ void issue_output(int stage, const uint32_t (&probabilities)[kKeys / 16][4]) {
    const uint64_t value = descriptor(value_low + uniform(stage) * (C::kStageBytes / 16));
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      constexpr int kStep = 16 * kColumns * 2 / 16;
#pragma unroll
      for (int n = 0; n < C::kDim; n += 128) {
        const uint64_t b = value + k * kStep + (n / 64) * (kTileBytes / 16);
        if constexpr (C::kDim % 128 == 0) {
          Wgmma<Element, true, 128>::rs(output + n / 2, probabilities[k], b, 1);
        } else {
          if (n + 128 <= C::kDim) {
            Wgmma<Element, true, 128>::rs(output + n / 2, probabilities[k], b, 1);
          } else {
            if constexpr (C::kDim % 128 >= 64) Wgmma<Element, true, 64>::rs(output + n / 2, probabilities[k], b, 1);
            if constexpr (C::kDim % 64 == 32) {
              constexpr int kSkip = C::kDim % 128 >= 64 ? 64 : 0;
              Wgmma<Element, true, 32>::rs(output + (n + kSkip) / 2, probabilities[k], b + (kSkip / 64) * (kTileBytes / 16), 1);
            }
          }
        }
      }
      if constexpr (C::kSumsByProduct) {
        Wgmma<Element, false, 8>::rs(rows.sum, probabilities[k], plain_descriptor(shared + C::kOnesAt), 1);
      }
    }
  }
  __device__ __forceinline__ void pin_output() {
    pin(output);
    if constexpr (C::kSumsByProduct) pin(rows.sum);
  }
  __device__ __forceinline__ void add_sums(const float (&sum)[2]) {
    if constexpr (!C::kSumsByProduct) {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows.sum[2 * r] += sum[r];
    }
  }

  // The elements of a tile that count, as bits of this lane. Returns whether any might not.
  __device__ __forceinline__ bool read_bits(const Entry& e, uint32_t (&bits)[kKeys / 64]) const {
    const int here = keys - e.column * kKeys;
#pragma unroll
    for (int h = 0; h < kKeys / 64; ++h) {
      bits[h] = 0xffffffffu;
      if (e.code == 2) bits[h] = shared_read(shared + C::kBitmapAt + e.stage * C::kBitmapBytes + bitmap_offset + 128 * h);
      if (here < kKeys) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (64 * h + 8 * (i / 4) + 2 * (lane % 4) + (i & 1) >= here) bits[h] &= ~(1u << i);
        }
      }
    }
    return e.code == 2 || here < kKeys;
  }

  // Exponentials with the maxima raised first.
  __device__ __forceinline__ void soften_exactly(uint32_t (&p)[kKeys / 16][4]) {
    float correction[2], sum[2];
    raise_maxima<C>(scores, a.scale_log2, rows, correction);
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) output[i] *= correction[(i / 2) & 1];
    exponentials<C>(scores, a.scale_log2, rows, p, sum);
    add_sums(sum);
  }

  // A tile with none before it in flight: its probabilities are ready afterwards.
  __device__ __forceinline__ void first_step(const Entry& e, Probabilities& probabilities) {
    wgmma_fence();
    pin(scores);
    issue_scores(e.stage);
    wgmma_commit();
    uint32_t bits[kKeys / 64];
    read_bits(e, bits);
    wgmma_wait<0>();
    pin(scores);
    release_keys(e.stage);
    mask_scores<kKeys>(scores, bits);
    soften_exactly(probabilities);
  }

  // Scores of the next tile; their softmax runs beside the output product of the tile before it. The exponentials are taken against
  // the running maxima of the tiles before; where those are exceeded by more than the slack (hardly ever after the first tile), they
  // are taken again.
  __device__ __forceinline__ void step(const Entry& e, const Entry& before, const Probabilities& held, Probabilities& fresh) {
    if (C::kInTurn && even) named_barrier_sync(4 + warpgroup, 256);
    wait_for_values(before);  // not between the products: a loop there would serialise them (warning C7520)
    wgmma_fence();
    pin(scores);
    pin_output();
    issue_scores(e.stage);
    wgmma_commit();
    issue_output(before.stage, held);
    wgmma_commit();
    if (C::kInTurn && even) named_barrier_arrive(4 + (warpgroup ^ 1), 256);
    uint32_t bits[kKeys / 64];
    const bool masked = read_bits(e, bits);
    wgmma_wait<1>();
    pin(scores);
    release_keys(e.stage);
    float sum[2];
    bool above;
    if (masked) {
      mask_scores<kKeys>(scores, bits);
      above = exponentials<C>(scores, a.scale_log2, rows, fresh, sum);
    } else {
      above = exponentials<C>(scores, a.scale_log2, rows, fresh, sum);
    }
    wgmma_wait<0>();
    pin_output();
    release_values(before.stage);
    if (__any_sync(0xffffffffu, above)) {
      soften_exactly(fresh);
    } else {
      add_sums(sum);
    }
  }

  __device__ __forceinline__ void last_step(const Entry& e, const Probabilities& held) {
    wait_for_values(e);
    wgmma_fence();
    pin_output();
    issue_output(e.stage, held);
    wgmma_commit();
    wgmma_wait<0>();
    pin_output();
    release_values(e.stage);
  }

  // Walks the list, by two tiles or one: a tile's probabilities may not overwrite those that a product still reads, so with one they are
  // copied. Gives Q's place back after the last score product.
  __device__ __forceinline__ void walk(uint32_t query_empty) {
    constexpr bool kHoldsQuery = !C::kQueryInRegisters && !C::kShareQueryOutput;
    bool holds_query = kHoldsQuery;
    const auto finish = [&](const Entry& e, const Probabilities& held) {
      if (kHoldsQuery && remaining == 0) {
        holds_query = false;
        arrive_for_warp(query_empty);
      }
      last_step(e, held);
    };
    Entry e, before;
    while (next(before, 0)) {
      first_step(before, even_tile);
      for (;;) {
        if (!next(e, reach(before))) {
          finish(before, even_tile);
          break;
        }
        step(e, before, even_tile, odd_tile);
        if constexpr (!C::kTwoTiles) {
          // Only an operation that the assembler can not see through keeps it from writing the first of these before the product has read
          // it (it would serialise the products: warning C7513).
          const uint32_t zero = static_cast<uint32_t>(remaining) >> 31;
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) even_tile[i / 4][i % 4] = odd_tile[i / 4][i % 4] | zero;
          before = e;
          continue;
        }
        if (!next(before, reach(e))) {
          finish(e, odd_tile);
          break;
        }
        step(before, e, odd_tile, even_tile);
      }
    }
    if (holds_query) arrive_for_warp(query_empty);
  }

  // Adds the other warpgroups' partial results for the same rows to warpgroup 0's, through the output buffer.
  __device__ __forceinline__ void merge() {
    const int thread = 32 * warp + lane;
    const uint32_t values = shared + C::kOutputAt + 4 * thread;
    const uint32_t statistics = shared + C::kStatisticsAt + 16 * thread;
    for (int source = 1; source < C::kWarpgroups; ++source) {
      named_barrier_sync(1, C::kWarpgroups * 128);
      if (warpgroup == source) {
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) shared_write(values + 512 * i, __float_as_uint(output[i]));
        shared_write4(statistics, make_int4(__float_as_int(rows.maximum[0]), __float_as_int(rows.maximum[1]),
                                            __float_as_int(rows.sum[0]), __float_as_int(rows.sum[2])));
      }
      named_barrier_sync(1, C::kWarpgroups * 128);
      if (warpgroup == 0) {
        const int4 other = shared_read4(statistics);
        const float maxima[2] = {__int_as_float(other.x), __int_as_float(other.y)};
        const float sums[2] = {__int_as_float(other.z), __int_as_float(other.w)};
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float maximum = fmaxf(rows.maximum[r], maxima[r]);
          mine[r] = exp2_fast(rows.maximum[r] - maximum);
          theirs[r] = exp2_fast(maxima[r] - maximum);
          rows.maximum[r] = maximum;
          rows.sum[2 * r] = rows.sum[2 * r] * mine[r] + sums[r] * theirs[r];
        }
#pragma unroll
        for (int i = 0; i < C::kDim / 2; ++i) {
          const int r = (i / 2) & 1;
          output[i] = output[i] * mine[r] + __uint_as_float(shared_read(values + 512 * i)) * theirs[r];
        }
      }
    }
    named_barrier_sync(1, C::kWarpgroups * 128);
  }

  __device__ __forceinline__ void store(int band, int head, int batch_index, uint32_t matrix_offset) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = rows.sum[2 * r];
      if constexpr (!C::kSumsByProduct) {
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
      factor[r] = sum == 0.0f ? a.empty_value : 1.0f / sum;
    }
    const uint32_t buffer = shared + C::kOutputAt + warpgroup * C::kBandBytes;
#pragma unroll
    for (int k = 0; k < C::kDim / 16; ++k) {
      const uint32_t address = buffer + (k / 4) * C::kBandTileBytes + (matrix_offset ^ (k % 4 * 32));
      const float* o = output + 8 * k;
      store_matrices(address, pack<Element>(o[0] * factor[0], o[1] * factor[0]),
                     pack<Element>(o[2] * factor[1], o[3] * factor[1]), pack<Element>(o[4] * factor[0], o[5] * factor[0]),
                     pack<Element>(o[6] * factor[1], o[7] * factor[1]));
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      for (int c = 0; c < C::kTiles; ++c) {
        tma_store(&a.o, buffer + c * C::kBandTileBytes + warp * 16 * kRowBytes, c * kColumns, band * kBand + warp * 16, head,
                  batch_index);
      }
      bulk_commit();
    }
  }

  __device__ __forceinline__ void run() {
    // Where this lane's row of an 8 x 8 matrix lies in a swizzled tile, for ldmatrix and stmatrix alike.
    const int row = warp * 16 + lane % 16;
    const uint32_t matrix_offset = row * 128 + (((lane / 16) ^ (lane % 8)) * 16);
    Ring<1> items;
    if (C::kInTurn && warpgroup == 1) named_barrier_arrive(4, 256);
    for (;;) {
      barrier_wait(shared + C::kQueryFullAt, items.phase);
      const int4 header = shared_read4(shared + C::kHeaderAt);
      const int4 more = shared_read4(shared + C::kHeaderAt + 16);
      const int batch_index = more.x;
      keys = more.y;
      const uint32_t query_empty = shared + C::kQueryEmptyAt;
      query_at = shared + C::kQueryAt + warpgroup * C::kBandBytes;
      items.advance();
      if (header.x < 0) break;
      remaining = header.x;
      const bool split = header.z & 8;
      const bool mine = split ? warpgroup == 0 : warpgroup < (header.z & 7);
      even = header.z & 16;
      code_shift = kCodeShift + 2 * warpgroup;
      bitmap_offset = (split ? 0 : warpgroup) * C::kBandBits + warp * (C::kBandBits / 4) + lane * 4;
      if constexpr (C::kQueryInRegisters) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          load_matrices(query[k], query_at + (k / 4) * C::kBandTileBytes + (matrix_offset ^ (k % 4 * 32)));
        }
        arrive_for_warp(query_empty);
      }
#pragma unroll
      for (int i = 0; i < C::kDim / 2; ++i) output[i] = 0.0f;
      rows = RowStatistics();
      walk(query_empty);
      if constexpr (C::kShareQueryOutput) named_barrier_sync(2 + warpgroup, 128);  // all warps are done with Q
      if (lane == 0) bulk_wait_read();
      __syncwarp();
      if (split) merge();
      if (mine) store(header.y + (split ? 0 : warpgroup), header.w, batch_index, matrix_offset);
      if constexpr (C::kShareQueryOutput) {
        if (lane == 0) bulk_wait_read();
        arrive_for_warp(query_empty);
      }
    }
    if (lane == 0) bulk_wait_read();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_block_sm90_kernel(const __grid_constant__ Args args) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (smem_address(raw) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(shared + C::kKeyFullAt + 8 * s, 1);
      barrier_init(shared + C::kKeyEmptyAt + 8 * s, C::kConsumerArrivals);
      if constexpr (C::kSplitStages) {
        barrier_init(shared + C::kValueFullAt + 8 * s, 1);
        barrier_init(shared + C::kValueEmptyAt + 8 * s, C::kConsumerArrivals);
      }
    }
    barrier_init(shared + C::kQueryFullAt, 1);
    barrier_init(shared + C::kQueryEmptyAt, C::kConsumerArrivals);
    barrier_init_fence();
    prefetch_map(&args.q);
    prefetch_map(&args.k);
    prefetch_map(&args.v);
    prefetch_map(&args.o);
  }
  if constexpr (C::kSumsByProduct) {
    if (threadIdx.x < C::kOnesBytes / 4) {
      shared_write(shared + C::kOnesAt + 4 * threadIdx.x, pack<typename C::Element>(1.0f, 1.0f));
      async_proxy_fence();
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_shrink<C::kProducerRegisters>();
    if (warp == 0) produce<C>(args, shared);
  } else {
    registers_grow<C::kConsumerRegisters>();
    Consumer<C> consumer{args, shared, warpgroup - 1, warp, static_cast<int>(threadIdx.x % 32)};
    consumer.run();
  }
}

}  // namespace stof::sm90
