// Block-wise forward attention, sm_80 and later: one block owns kRows query rows of one head, walks the row tile's list
// of non-empty column tiles with an online softmax, and never touches an empty tile.
//   - K and V of the next list entries are in flight (cp.async, kStages deep) while this one is computed.
//   - Full tiles meet no bitmap test; part tiles apply two bits a lane per 8x8, held in a register per band.
//   - A warp skips the column tiles whose bits are all zero in its own rows.
// Two forms of one kernel. Exact: the mask's tile is the kernel's tile, no score modifiers: the hot path. General: any mask
// tile that is a multiple of the kernel's, bias, softcap, run-time key masks, every masked_row, any scale.
#pragma once
#include "bitmap.cuh"
#include "epilogue.cuh"
#include "schedule.h"
#include "work_item.cuh"
#include "score_mod.cuh"
#include "smem_tile.cuh"
#include "softmax.cuh"
#include "tile_list.cuh"

namespace stof {

template <typename Engine_, int kDim_, int kBands_, int kCols_, int kWarps_, int kStages_, int kMinBlocks_, bool kGeneral_>
struct BlockTraits {
  using Engine = Engine_;
  using T = typename Engine::T;
  static constexpr int kDim = kDim_, kBands = kBands_, kCols = kCols_, kWarps = kWarps_, kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kBands * kWarps;
  static constexpr int kBlocks8 = kCols / 8, kOut8 = kDim / 8;
  using QTile = SmemTile<T, kRows, kDim>;
  using KvTile = SmemTile<T, kCols, kDim>;
  static constexpr int kSharedBytes = QTile::kBytes + 2 * kStages * KvTile::kBytes;
};

// What each step reads once or twice: kept in shared memory, since registers are what these kernels are short of. An entry is
// one kernel tile; in the general form several of them make an entry of the mask's list.
template <typename T>
struct BlockState {
  const T* k;      // at (b, kv head)
  const T* v;
  int64_t out;     // offset of (b, h) in O
  int slot;        // of a split piece, else -1
  int first_row;   // of the queries
  int limit;       // keys that exist
  int full;        // entries below it are full tiles, the rest part tiles
  int full_first;  // list entry e is full_col_idx[full_first + e], or, past the full ones, part_col_idx[part_first + e]
  int part_first;  // and bitmap[part_first + e]
};

// log2_scale turns what the online softmax sees into log2 units: scale * log2(e), and 1 in the general form, whose score
// modifiers do that. As a parameter it stays in the constant bank.
template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kMinBlocks) void block_attention(
    const __grid_constant__ AttentionParams p, const __grid_constant__ Schedule schedule,
    const float log2_scale) {
  using T = typename Traits::T;
  using QTile = typename Traits::QTile;
  using KvTile = typename Traits::KvTile;
  constexpr int kBands = Traits::kBands, kCols = Traits::kCols, kStages = Traits::kStages;
  constexpr int kBlocks8 = Traits::kBlocks8, kOut8 = Traits::kOut8;
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockState<T> block_storage;
  volatile BlockState<T>& block = block_storage;  // volatile: read anew each time instead of kept
  char* const q_shared = shared;
  char* const k_shared = shared + QTile::kBytes;
  char* const v_shared = k_shared + kStages * KvTile::kBytes;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const WorkItem item = work_item(schedule, blockIdx.x);
  const int mask = mask_of(p.mask, item.b, item.h);

  // Kernel rows of one mask row tile follow each other in the order.
  int sub_m = 0, sub_shift = 0, order = item.order;
  if constexpr (Traits::kGeneral) {
    const int rows_shift = 31 - __clz(p.mask.tile_m / Traits::kRows);
    sub_m = order & ((1 << rows_shift) - 1);
    order >>= rows_shift;
    sub_shift = 31 - __clz(p.mask.tile_n / kCols);
  }
  const int mask_row = ordered_row(p.mask, mask, order);
  const int first_row = mask_row * (Traits::kGeneral ? p.mask.tile_m : Traits::kRows) + sub_m * Traits::kRows;
  if (first_row >= p.seq_q) return;

  const T* const q = static_cast<const T*>(p.q.ptr) + item.b * p.q.stride_b + item.h * p.q.stride_h;
  QTile::template load<Traits::kThreads>(smem_address(q_shared), q, p.q.stride_s, first_row, p.seq_q, p.dim, threadIdx.x);

  int begin = 0, count;
  {
    const int tile_n = Traits::kGeneral ? p.mask.tile_n : kCols;
    const int limit = key_limit(p, item.b);
    const TileList list(p.mask, mask, mask_row, (limit + tile_n - 1) / tile_n);
    count = list.count() << sub_shift;
    if (item.splits > 1) {
      const unsigned total = count;  // below 2^31 / 32, splits up to 256
      begin = total * item.split / item.splits;
      count = total * (item.split + 1) / item.splits;
    }
    if (threadIdx.x == 0) {
      block.k = static_cast<const T*>(p.k.ptr) + item.b * p.k.stride_b + item.kv_head * p.k.stride_h;
      block.v = static_cast<const T*>(p.v.ptr) + item.b * p.v.stride_b + item.kv_head * p.v.stride_h;
      block.out = item.b * p.o.stride_b + item.h * p.o.stride_h;
      block.first_row = first_row;
      block.slot = item.splits > 1 ? item.slot : -1;
      block.limit = limit;
      block.full = list.full << sub_shift;
      block.full_first = list.full_first;
      block.part_first = list.part_first - list.full;
    }
    __syncthreads();
  }

  typename Traits::Engine engine(q_shared, warp, lane, p.f32_math == F32Math::kTf32x3);
  const ScoreModifier<T> modifier(p, item.b, item.h);
  float o[kBands][kOut8][4];
  RowState state[kBands][2];
  bool filled[2];  // general: rows done in the first pass

  for (int pass = 0;; ++pass) {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      state[band][0] = state[band][1] = RowState();
#pragma unroll
      for (int d = 0; d < kOut8; ++d) o[band][d][0] = o[band][d][1] = o[band][d][2] = o[band][d][3] = 0.f;
    }

    // Invariant at the head of step i: columns[x] is the column of entry i + x; the loads of entries below i + kStages - 1
    // are committed, one group an entry (the first also holds Q).
    auto column_of = [&](int i) {
      if (i >= count) return 0;
      if (Traits::kGeneral && pass == 1) return i;
      const int entry = i >> sub_shift;
      const int column = __ldg(i < block.full ? p.mask.full_col_idx + block.full_first + entry
                                              : p.mask.part_col_idx + block.part_first + entry);
      return (column << sub_shift) + (i & ((1 << sub_shift) - 1));
    };
    int into = 0, from = 0;  // stages: loaded next, computed now
    auto load = [&](int i, int column) {
      if (i < count) {
        const int slot = into * KvTile::kBytes, thread = opaque(threadIdx.x);
        into = into + 1 == kStages ? 0 : into + 1;
        KvTile::template load<Traits::kThreads>(smem_address(k_shared) + slot, block.k, p.k.stride_s, column * kCols, block.limit, p.dim,
                                                thread);
        KvTile::template load<Traits::kThreads>(smem_address(v_shared) + slot, block.v, p.v.stride_s, column * kCols, block.limit, p.v_dim,
                                                thread);
      }
      cp_async_commit();
    };
    constexpr int kAhead = kStages - 1;
    int columns[kStages];
#pragma unroll
    for (int x = 0; x < kStages; ++x) columns[x] = column_of(begin + x);
#pragma unroll
    for (int x = 0; x < kAhead; ++x) load(begin + x, columns[x]);

    BandBits<Traits::kRows, kCols> bits[kBands];
    auto load_bits = [&](int i) {
      if (i >= block.full && i < count) {
        const int entry = block.part_first + (i >> sub_shift);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          if constexpr (Traits::kGeneral) {
            bits[band].word[0] = fragment_bits16(p.mask, entry, sub_m * (Traits::kRows / 16) + warp, i & ((1 << sub_shift) - 1), lane);
          } else {
            bits[band].load(p.mask, entry, warp * kBands + band, lane);
          }
        }
      }
    };
    load_bits(begin);
    if (count <= begin) {  // Q's load is still in flight, and its place is written below
      cp_async_wait<0>();
      __syncthreads();
    }

    for (int i = begin; i < count; ++i) {
      if constexpr (kStages == 1) {
        __syncthreads();
        load(i, columns[0]);
        cp_async_wait<0>();
        __syncthreads();
      } else {
        cp_async_wait<kStages - 2>();
        __syncthreads();
        load(i + kAhead, columns[kAhead]);
      }
      if (i == begin) engine.load_q();
      const int column = columns[0], slot = from * KvTile::kBytes;
      from = from + 1 == kStages ? 0 : from + 1;
#pragma unroll
      for (int x = 0; x < kAhead; ++x) columns[x] = columns[x + 1];
      columns[kAhead] = column_of(i + kStages);

      bool masked = i >= block.full;
      if (masked) {
        bool any = false, every = true;
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          any |= bits[band].any();
          every &= bits[band].every();
        }
        if (!__any_sync(~0u, any)) {
          load_bits(i + 1);
          continue;
        }
        masked = !__all_sync(~0u, every);
      }

      float s[kBands][kBlocks8][4];
      engine.scores(s, k_shared + slot);

      const int first_key = column * kCols;
      if constexpr (Traits::kGeneral) {
        if (pass == 1 && p.masked_row == MaskedRow::kMean) {
#pragma unroll
          for (int j = 0; j < kBlocks8; ++j) s[0][j][0] = s[0][j][1] = s[0][j][2] = s[0][j][3] = 0.f;
        } else {
          modifier.apply(p, s[0], block.first_row + warp * 16 + lane / 4, first_key + 2 * (lane % 4), pass == 0);
        }
      }
      if (masked) {
#pragma unroll
        for (int band = 0; band < kBands; ++band)
#pragma unroll
          for (int j = 0; j < kBlocks8; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[band][j][c] = bits[band].allowed(j, c) ? s[band][j][c] : -INFINITY;
      }
      load_bits(i + 1);
      const int limit = block.limit;
      if (static_cast<unsigned>(first_key) + kCols > static_cast<unsigned>(limit)) {
        const unsigned key = first_key + 2 * (lane % 4);
#pragma unroll
        for (int band = 0; band < kBands; ++band)
#pragma unroll
          for (int j = 0; j < kBlocks8; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              if (key + 8 * j + c % 2 >= static_cast<unsigned>(limit)) s[band][j][c] = -INFINITY;
      }
#pragma unroll
      for (int band = 0; band < kBands; ++band) online_softmax(s[band], o[band], state[band], log2_scale);
      engine.accumulate(o, s, v_shared + slot);
    }

#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      state[band][0].sum = quad_sum(state[band][0].sum);
      state[band][1].sum = quad_sum(state[band][1].sum);
    }

    if (schedule.splits > 1 && block.slot >= 0) {
#pragma unroll
      for (int band = 0; band < kBands; ++band)
        store_partial(p, Traits::kRows, block.slot, (warp * kBands + band) * 16 + lane / 4, lane, o[band], state[band], log2_scale);
      return;
    }
    T* const out = static_cast<T*>(p.o.ptr) + block.out;
    // In the second pass: raw scores that are all -inf (by bias) have no softmax either.
    const float unseen = p.masked_row == MaskedRow::kNan || (Traits::kGeneral && pass == 1) ? NAN : 0.f;
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      normalise(o[band], 0, state[band][0], unseen);
      normalise(o[band], 1, state[band][1], unseen);
    }
    if constexpr (!Traits::kGeneral) {
      store_staged<T, QTile>(out, p.o.stride_s, block.first_row, p.seq_q, p.v_dim, q_shared, o, warp, lane);
      return;
    } else {
      const bool second = p.masked_row == MaskedRow::kMean || p.masked_row == MaskedRow::kScores;
      bool left = false;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = block.first_row + warp * 16 + lane / 4 + 8 * i;
        const bool seen = state[0][i].sum != 0.f;
        if (pass == 0) filled[i] = seen || !second;
        if (row < p.seq_q && (pass == 0 ? filled[i] : !filled[i]))
          store_row_pairs(out + static_cast<int64_t>(row) * p.o.stride_s, o[0], i, lane, p.v_dim);
        left |= row < p.seq_q && !filled[i];
      }
      if (pass == 1 || !__syncthreads_or(left)) return;
      count = (p.seq_kv + kCols - 1) / kCols;
      if (threadIdx.x == 0) block.limit = p.seq_kv, block.full = count;
      __syncthreads();
    }
  }
}

}  // namespace stof
