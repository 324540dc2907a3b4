// Grouped GEMM of the experts: persistent, warp-specialised, weights as the 64-row operand.
//
//   tile = 256 weight rows x 16 .. 160 tokens of one expert; K in steps of 128 bytes of a weight row
//
//   producer warpgroup (threads 0-127)                     2 math warpgroups, 2 x 64 weight rows each
//     w  2 boxes of 128 rows ─TMA, 128-byte swizzle──► A ┐
//     tokens, gathered ──cp.async, swizzled by hand──► B ├─ ring ──full──►  wgmma m64 n{16..160}, FP32 accumulators
//     (scales of FP8 weights and tokens ──cp.async──► S) ┘       ◄─empty──  SwiGLU or nothing, BF16 or (h, FP8) E4M3,
//                                                                           through shared memory ──► h or y rows
//
//   kUp:   rows are 64 gate + the same 64 up of each math warpgroup, so a thread holds gate and up of one element
//   kDown: rows are 128 consecutive rows of w2 per math warpgroup
//
// Token tiles come from the routing kernel's table, so the host never reads a count. Consecutive work tiles are the row
// tiles of one token tile; the token tiles of one expert are neighbours, so the second reads its weights from L2. A
// block takes its next work tile near the end of the current one, because tiles and memory speed differ.
//
// Paired (args.paired; clusters of two blocks): the two blocks work on two token tiles of one expert and the same
// weight rows. Each loads one of the two boxes and multicasts it to both: L2, the limit of BF16, serves a third less.
//
//   block 0  box 0 ──TMA, multicast──┬──► A of block 0 ──► its tokens               empty[stage] of both blocks opens
//   block 1  box 1 ──TMA, multicast──┴──► A of block 1 ──► its tokens               after the math warps of both
//
// Modes:
//   kBf16        BF16 x BF16.
//   kFp8Weights  E4M3 x BF16: weights are converted to BF16 in registers; prepare_tokens.cuh permutes the tokens.
//   kMxfp4Weights  E2M1 codes x BF16: likewise, 256 of K per stage, with the exponents of its groups as they lie in
//                memory, or those of all of K beside the ring (TileScales). The scales are part of the BF16 weights, so
//                there are no partial sums and tiles can be wider.
//   kInt4Weights  INT4 codes x BF16: the same, with the scales and zero points of the groups.
//   kMxfp4       E2M1 codes x E4M3: weights are converted to E4M3 in registers, relative to the largest scale of their
//                row (mxfp4.cuh). Tokens as in kFp8, in the order of e4m3_position.
//   kFp8         E4M3 x E4M3: the scales of the weights, and of h, apply to FP32 partial sums per 128 of K; x has one
//                scale per token, which applies to the sums (grouped_gemm_sm90_products.cuh).
//
// Barriers and the arrivals that open them:
//   full[stage]   128 + 1: every producer thread once its copies have landed, and thread 0 with the TMA byte count;
//                 kMxfp4, kDown: + 32, the first warp's threads once more when their ratios are stored
//   empty[stage]  8, one per math warp; paired: 16
//   full[slot]    1, of the work queue
//   full, empty of the buffers of scales: see TileScales
// Producers wait for work and empty stages, math warps for work and full stages. The math warps' fence after their wait
// makes what cp.async wrote visible to wgmma. In a pair, bytes may land before this block expects them: the phase stays
// open because the arrival that expects them is still missing.
//
// Programmatic dependent launch: kDown starts when kUp has no work left for a block. It fills its ring with weights,
// then waits for h tile by tile: kUp counts the finished row tiles of every token tile (TokenTile::row_tiles_done).
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_sm90_epilogue.cuh"
#include "moeopt/grouped_gemm_sm90_products.cuh"
#include "moeopt/grouped_gemm_sm90_shape.cuh"

namespace moeopt {

// Loads the weights of one stage, by one thread; paired: one of the two boxes, for both blocks.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void copy_weights(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1,
                                const GemmRing& ring, int expert, int row_tile, int step) {
  using Shape = GemmShape<kMode, kTokens>;
  uint64_t* full = ring.full + ring.stage;
  mbarrier_arrive_expect_tx(full, Shape::kWeightBytes);
  const int x = step * Shape::kMapStep;
  if (args.paired) {
    const int box = cluster_ctarank();
    tma_load_3d_multicast(ring.data() + box * kBoxBytes, box ? map1 : map0, x, box_row<kUp>(row_tile, box), expert,
                          full);
  } else if (args.weights_evict_first) {
    tma_load_3d_evict_first(ring.data(), map0, x, box_row<kUp>(row_tile, 0), expert, full);
    tma_load_3d_evict_first(ring.data() + kBoxBytes, map1, x, box_row<kUp>(row_tile, 1), expert, full);
  } else {
    tma_load_3d(ring.data(), map0, x, box_row<kUp>(row_tile, 0), expert, full);
    tma_load_3d(ring.data() + kBoxBytes, map1, x, box_row<kUp>(row_tile, 1), expert, full);
  }
}

// Fills the empty ring with the weights of the first work tile, which no earlier launch writes. Returns the number of
// stages. The routing is complete: kUp waited for it before it let this launch start.
template <GemmMode kMode, int kTokens>
MOEOPT_DEVICE int copy_first_weights(const GemmArgs& args, const TensorMap* map, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  const TileScheduler<false> scheduler(args);
  if (scheduler.first() >= scheduler.count) return 0;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int ahead = num_steps < args.num_stages ? num_steps : args.num_stages;
  if (thread_index() == 0) {
    const WorkTile work = scheduler.at(scheduler.first(), 0);  // both tiles of a pair have one expert
    for (int step = 0; step < ahead; ++step) {
      copy_weights<kMode, kTokens, false>(args, map, map, ring, work.expert, work.row_tile, step);
      ring.advance();
    }
  }
  return ahead;
}

// The first producer warp writes these into the stages beside the weights: the scales of the weight blocks and, in wide
// FP8 tiles of kDown, the ratio of each token's scale to its scale of the next 128 of K. It reads them a step ahead.
template <GemmMode kMode, int kTokens, bool kUp>
struct StageScales {
  static constexpr bool kHasFactors = kMode == GemmMode::kFp8Weights || kMode == GemmMode::kFp8;
  static constexpr bool kHasRatios = kMode == GemmMode::kFp8 && !kUp && kTokens > kExactColumns;
  static constexpr int kPerLane = kHasRatios ? (kTokens + 31) / 32 : 1;

  const float* factor_source = nullptr;
  const float* token_scale;
  int groups, columns;  // columns: 0 where no ratios are needed
  float factor = 1.0f, now[kPerLane], before[kPerLane];

  MOEOPT_DEVICE StageScales(const GemmArgs& args, const TokenTile& tile, int row_tile)
      : groups(ceil_div(args.depth, 128)),
        columns(kHasRatios && (kHalfColumns<kTokens> > kExactColumns || tile.count > kHalfColumns<kTokens>) ? tile.count
                                                                                                            : 0) {
    const int lane = thread_index();
    if (kHasFactors && args.scale_kind == ScaleKind::kBlock128 && lane < kFactors) {
      const int operand = lane / 4 % 2, first = first_row<kUp>(row_tile, lane / 8, operand);
      const int inside = first + lane % 4 * 16 < args.rows ? first + lane % 4 * 16 : 0;
      const int row = kUp ? w13_row(args.activation, args.rows, inside, operand) : inside;
      factor_source = block_scales(args.weight_scale, tile.expert, args.weight_rows, args.depth, row);
    }
    token_scale = args.token_scale + static_cast<int64_t>(tile.begin) * groups;
    load(0);
    MOEOPT_UNROLL
    for (int i = 0; i < kPerLane; ++i) before[i] = now[i];
  }

  MOEOPT_DEVICE void load(int step) {
    if (factor_source != nullptr) factor = ld_global_nc(factor_source + step);
    MOEOPT_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int n = thread_index() + 32 * i;
      now[i] = n < columns ? ld_global_cg(token_scale + n * groups + step) : 1.0f;
    }
  }

  MOEOPT_DEVICE void store(float* scales) {
    if (factor_source != nullptr) scales[kFactorOffset + thread_index()] = factor;
    MOEOPT_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int n = thread_index() + 32 * i;
      if (n < columns) scales[kRatioOffset + token_scale_place(n)] = before[i] * rcp_approx(now[i]);
      before[i] = now[i];
    }
  }
};

// kMxfp4, kDown: the same ratios before each of the two 128 of K of a stage. Read when they are needed, which is a ring
// of stages before they are used: this warp has no registers to keep scales from step to step.
template <int kTokens>
struct StageRatios {
  static constexpr int kPerLane = (kTokens + 31) / 32;

  const float* token_scale;
  int groups, columns;

  MOEOPT_DEVICE StageRatios(const GemmArgs& args, const TokenTile& tile, int /*row_tile*/)
      : token_scale(args.token_scale + static_cast<int64_t>(tile.begin) * ceil_div(args.depth, 128)),
        groups(ceil_div(args.depth, 128)), columns(tile.count) {}
  MOEOPT_DEVICE void load(int) {}
  MOEOPT_DEVICE void store(float* ratios, int step) {
    MOEOPT_NO_UNROLL
    for (int piece = 0; piece < 2; ++piece) {
      // Behind the last group, and before the first, where all sums are zero, the ratio is 1.
      const int group = 2 * step + piece, before = group > 0 && group < groups ? 1 : 0;
      float now[kPerLane], last[kPerLane];
      MOEOPT_UNROLL
      for (int i = 0; i < kPerLane; ++i) {
        const int n = thread_index() + 32 * i;
        const float* scale = token_scale + n * groups + (group < groups ? group : groups - 1);
        now[i] = n < columns ? ld_global_cg(scale) : 1.0f;
        last[i] = n < columns ? ld_global_cg(scale - before) : 1.0f;
      }
      MOEOPT_UNROLL
      for (int i = 0; i < kPerLane; ++i) {
        const int n = thread_index() + 32 * i;
        if (n < columns) ratios[piece * kMxfp4Ratios + token_scale_place(n)] = last[i] * rcp_approx(now[i]);
      }
    }
  }
};

// MXFP4: the weights warp copies the exponents of a stage's 256 rows, 8 bytes each, beside the weights. A row's
// exponents may start at any address, but copies are of aligned words: three words per row, of which exponent i is byte
// `skew` + i. Words past the end of a row, or of all rows, arrive as zeros: finite scales of zero weights.
struct StageExponents {
  // Of this lane's first row in either box. Its other rows are 32 apart, so they have the same skew.
  const unsigned char* words[2];
  int skew[2], rows_left[2], stride, groups;

  template <bool kUp>
  MOEOPT_DEVICE static StageExponents of(const GemmArgs& args, const WorkTile& work) {
    StageExponents exponents;
    exponents.groups = args.depth / static_cast<int>(kScaleGroup);
    const int apart = kUp ? w13_row(args.activation, args.rows, 1, 0) : 1;  // rows of a box in memory
    exponents.stride = 32 * apart * exponents.groups;
    MOEOPT_UNROLL
    for (int box = 0; box < 2; ++box) {
      const int row = box_row<kUp>(work.row_tile, box) + thread_index();
      const int inside = row < args.rows ? row : 0,
                weight_row = kUp ? w13_row(args.activation, args.rows, inside, box) : inside;
      const unsigned char* start =
          args.exponents + (static_cast<int64_t>(work.expert) * args.weight_rows + weight_row) * exponents.groups;
      exponents.rows_left[box] = args.rows - row;
      exponents.skew[box] = static_cast<int>(reinterpret_cast<uintptr_t>(start) % 4);
      exponents.words[box] = start - exponents.skew[box];
    }
    return exponents;
  }
  // kRowBytes: of a row in the stage, 12 or more.
  template <int kRowBytes>
  MOEOPT_DEVICE void copy(unsigned char* scales, int step) const {
    MOEOPT_UNROLL
    for (int box = 0; box < 2; ++box) {
      const int bytes = groups + skew[box] - 8 * step;  // that are left of the row
      MOEOPT_UNROLL
      for (int i = 0; i < kBoxRows / 32; ++i) {
        const bool inside = 32 * i < rows_left[box];
        const unsigned char* from = words[box] + (inside ? i * stride + 8 * step : 0);
        unsigned char* to = scales + (box * kBoxRows + i * 32 + thread_index()) * kRowBytes;
        cp_async_4(to, from, inside);
        cp_async_4(to + 4, from + 4, inside && bytes > 4);
        if (skew[box] > 0) cp_async_4(to + 8, from + 8, inside && bytes > 8);
      }
    }
  }
};

// INT4: the same for the scales and zero points of a stage's 256 rows: 8, 4 or 2 of each per row. A word of either may
// begin in the group before; where it does follows from the group's number (Int4FactorsOfLane). Nothing is kept from
// stage to stage, for which this warp has no registers.
struct StageInt4Factors {
  // Copies the words that hold `bytes` bytes from the offset on.
  template <int kWords>
  MOEOPT_DEVICE static void copy_words(unsigned char* to, const unsigned char* base, int offset, int bytes,
                                       bool inside) {
    const unsigned char* from = base + (offset & ~3);
    bytes += offset & 3;
    MOEOPT_UNROLL
    for (int w = 0; w < kWords; ++w) {
      if (4 * w < bytes) cp_async_4(to + 4 * w, from + 4 * w, inside);
    }
  }
  template <bool kUp>
  MOEOPT_DEVICE static void copy(const GemmArgs& args, const WorkTile& work, unsigned char* stage, int step) {
    const Int4Factors& of = args.int4;
    const int groups = args.depth >> of.shift, per_step = 256 >> of.shift, left = groups - step * per_step;
    const int count = left < per_step ? left : per_step;
    const int64_t expert = static_cast<int64_t>(work.expert) * args.weight_rows * groups;  // its first group
    MOEOPT_NO_UNROLL
    for (int r = 0; r < 2 * kBoxRows / 32; ++r) {
      const int box = r / (kBoxRows / 32),
                row = box_row<kUp>(work.row_tile, box) + r % (kBoxRows / 32) * 32 + thread_index();
      const bool inside = row < args.rows;
      const int read = inside ? row : 0, weight_row = kUp ? w13_row(args.activation, args.rows, read, box) : read;
      const int begin = weight_row * groups + step * per_step;
      unsigned char* to = stage + (r * 32 + thread_index()) * kInt4RowBytes;
      copy_words<5>(to, reinterpret_cast<const unsigned char*>(of.scale + expert), 2 * begin, 2 * count, inside);
      if (of.zero != nullptr) copy_words<3>(to + kInt4ZeroOffset, of.zero + expert, begin, count, inside);
    }
  }
};

// Run by the first lane of the weights warp (in the first block of a cluster): pushes each work tile when the one
// before it begins, and takes the number of the one after it, so that nobody waits for the atomic.
template <bool kUp>
struct QueueFiller {
  TileScheduler<kUp> scheduler;
  WorkQueue queue;
  int next;

  MOEOPT_DEVICE QueueFiller(const GemmArgs& args, const WorkQueue& queue_)
      : scheduler(args), queue(queue_), next(scheduler.second()) {}
  MOEOPT_DEVICE void push(int work) {
    if (scheduler.blocks() == 1) {
      queue.push(scheduler.at(work, 0));
    } else {
      for (int rank = 0; rank < 2; ++rank) queue.push_cluster(scheduler.at(work, rank), rank);
    }
    queue.advance();
  }
  MOEOPT_DEVICE void push_next() {
    push(next);
    next = scheduler.take();
  }
};

// Run by the first lane of kUp's weights warp: tells the next launch that a row tile of h is stored. A math warp that
// releases a stage of one tile has stored the tile before, and the weights warp waits for that release anyway. So math
// warps signal, and wait for their stores, only at the end. The weights warp is a ring of stages ahead of the release.
struct TileSignals {
  const GemmArgs& args;
  WorkQueue queue;
  int steps_left, num_steps;  // steps_left: until the oldest tile not signalled yet is stored

  MOEOPT_DEVICE TileSignals(const GemmArgs& args_, const WorkQueue& queue_, int num_steps_)
      : args(args_), queue(queue_), steps_left(args_.num_stages + num_steps_), num_steps(num_steps_) {}
  // Call it after the wait for the stage of one more step.
  MOEOPT_DEVICE void step() {
    if (steps_left-- > 0) return;
    red_add_release(&args.tiles[queue.pop().token_tile].row_tiles_done, 1);
    steps_left += num_steps;
  }
  MOEOPT_DEVICE void end() {
    mbarrier_wait_parity(queue.math_done, 0);
    for (WorkTile work = queue.pop(); work.expert >= 0; work = queue.pop()) {
      red_add_release(&args.tiles[work.token_tile].row_tiles_done, 1);
    }
  }
};

// Waits until h of the token tile is stored. The blocks that store it are running: no block of kDown starts before all
// blocks of kUp have started.
MOEOPT_DEVICE void wait_for_rows(const GemmArgs& args, const WorkTile& work) {
  wait_ld_acquire(&args.tiles[work.token_tile].row_tiles_done, ceil_div(args.depth, kBoxRows));
}

template <GemmMode kMode, bool kUp>
constexpr bool kHasMxfp4Ratios = kMode == GemmMode::kMxfp4 && !kUp;

// Copies the scales of a work tile's groups beside the ring, by one thread. The 128 rows of either box are neighbours
// in memory; in kDown, and where gate and up alternate, so are all 256. geometry.h checks that every part is whole 16
// bytes.
template <GemmMode kMode, bool kUp>
MOEOPT_DEVICE void copy_tile_scales(const GemmArgs& args, const TileScales& scales, const WorkTile& work) {
  constexpr bool kInt4 = kMode == GemmMode::kInt4Weights;
  const bool alternate = kUp && args.activation == Activation::kSwigluOai, apart = kUp && !alternate;
  const int groups = kInt4 ? args.depth >> args.int4.shift : args.depth / static_cast<int>(kScaleGroup);
  const int row = box_row<kUp>(work.row_tile, 0), together = apart ? kBoxRows : 2 * kBoxRows;
  const int left = alternate ? 2 * (args.rows - row) : args.rows - row, rows = left < together ? left : together;
  const int parts = apart ? 2 : 1, bytes = rows * groups;  // bytes: of one part, a byte per group
  uint64_t* full = scales.full();
  const bool zeros = kInt4 && args.int4.zero != nullptr;
  mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(parts * bytes * (kInt4 ? zeros ? 3 : 2 : 1)));
  for (int part = 0; part < parts; ++part) {
    const int first = kUp ? w13_row(args.activation, args.rows, row, part) : row;
    const int64_t group = (static_cast<int64_t>(work.expert) * args.weight_rows + first) * groups;
    unsigned char* to = scales.data() + part * kBoxRows * groups * (kInt4 ? 2 : 1);
    if constexpr (kInt4) {
      bulk_load(to, args.int4.scale + group, 2 * bytes, full);
      unsigned char* to_zeros = scales.data() + (2 * 2 * kBoxRows + part * kBoxRows) * groups;
      if (zeros) bulk_load(to_zeros, args.int4.zero + group, bytes, full);
    } else {
      bulk_load(to, args.exponents + group, bytes, full);
    }
  }
}

// The first producer warp: the work queue, weights, and scales.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_weights(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1, GemmRing ring,
                                   WorkQueue queue, ScalesBeside<kMode> tile_scales) {
  using Shape = GemmShape<kMode, kTokens>;
  int ahead = kUp ? 0 : copy_first_weights<kMode, kTokens>(args, map0, ring);
  if (kUp) griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // kUp: after the wait, see copy_first_weights
  const int num_steps = ceil_div(args.depth, Shape::kDepth), lane = thread_index();
  const bool fills_queue = lane == 0 && (!args.paired || cluster_ctarank() == 0);
  QueueFiller<kUp> filler(args, queue);
  TileSignals signals(args, queue, num_steps);
  if (fills_queue) filler.push(filler.scheduler.first());
  for (WorkTile work = queue.pop(); work.expert >= 0; work = queue.pop()) {
    const bool beside = Shape::kTileScales && tile_scales.used();
    // A single buffer is free when the tile before is done: first the stages are filled that it has released.
    const int filled_first =
        args.scale_buffers > 1 ? 0 : (num_steps < args.num_stages ? num_steps : args.num_stages) - 1;
    if (StageScales<kMode, kTokens, kUp>::kHasRatios || kHasMxfp4Ratios<kMode, kUp>) wait_for_rows(args, work);
    using Scales =
        std::conditional_t<kHasMxfp4Ratios<kMode, kUp>, StageRatios<kTokens>, StageScales<kMode, kTokens, kUp>>;
    Scales scales(args, work.tile(), work.row_tile);
    StageExponents exponents;
    if constexpr (Shape::kMxfp4) exponents = StageExponents::of<kUp>(args, work);
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait_parity(ring.empty + ring.stage, ring.parity ^ 1u);
      if (ahead > 0) {
        --ahead;
      } else if (lane == 0) {
        copy_weights<kMode, kTokens, kUp>(args, map0, map1, ring, work.expert, work.row_tile, step);
      }
      if constexpr (kHasTileScales<kMode>) {
        if (beside && step == filled_first) {
          mbarrier_wait_parity(tile_scales.empty(), tile_scales.parity ^ 1u);
          if (lane == 0) copy_tile_scales<kMode, kUp>(args, tile_scales, work);
          tile_scales.advance();
        }
      }
      if constexpr (Shape::kMxfp4) {
        if (!beside) {
          exponents.template copy<Shape::kExponentBytes>(ring.data() + Shape::kScaleOffset, step);
        }
        cp_async_mbarrier_arrive(ring.full + ring.stage);
        if constexpr (kHasMxfp4Ratios<kMode, kUp>) {
          auto* behind = ring.data() + Shape::kScaleOffset + Shape::kBoxes * kBoxRows * Shape::kExponentBytes;
          scales.store(reinterpret_cast<float*>(behind) + kMxfp4Ratios, step);
          mbarrier_arrive_cluster(ring.full + ring.stage, args.paired ? cluster_ctarank() : 0);
        }
      } else if constexpr (Shape::kInt4) {
        if (!beside) StageInt4Factors::copy<kUp>(args, work, ring.data() + Shape::kScaleOffset, step);
        cp_async_mbarrier_arrive(ring.full + ring.stage);
      } else {
        scales.store(reinterpret_cast<float*>(ring.data() + Shape::kScaleOffset));
        mbarrier_arrive_cluster(ring.full + ring.stage, args.paired ? cluster_ctarank() : 0);
      }
      ring.advance();
      if (step == 0 && fills_queue) filler.push_next();
      if (kUp && lane == 0) signals.step();
      if (step < num_steps - 1) scales.load(step + 1);
    }
  }
  if (kUp && lane == 0) signals.end();
  if (!kUp) griddepcontrol_wait();  // kUp has stored all h but may still run; the next kernel must wait for both
}

constexpr uint32_t kNoRow = 0xffffffffu;
constexpr int kTokenThreads = kProducerThreads - 32;
constexpr int kRowsAtOnce = kTokenThreads / 8;

// Copies a thread's 16 bytes of `rounds` rows into one stage. kSure: a lower bound of `rounds`.
template <int kTokens, int kSure, int kTokenTiles, int kRounds>
MOEOPT_DEVICE void copy_rows(int rounds, const uint32_t (&vectors)[kRounds], const unsigned char* from, int bytes_left,
                             unsigned char* to, unsigned char* to_other) {
  MOEOPT_UNROLL
  for (int half = 0; half < kTokenTiles; ++half) {
    // Past the end of K weights arrive as zeros. Tokens must be zero too: 0 * NaN is not 0.
    const bool inside = bytes_left > half * 128;
    const unsigned char* source = inside ? from + half * 128 : from;
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {
      if (j >= kSure && j >= rounds) break;
      const int row = (thread_index() - 32) / 8 + j * kRowsAtOnce;
      if ((j + 1) * kRowsAtOnce > kTokens && row >= kTokens) break;
      cp_async_16((j % 2 ? to_other : to) + (half * kTokens + j * kRowsAtOnce) * 128,
                  source + static_cast<uint64_t>(vectors[j]) * 16, inside);
    }
  }
}

// The other producer warps: tokens and their scales. 8 threads copy a row of 128 bytes, all of them kRowsAtOnce rows.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_tokens(const GemmArgs& args, GemmRing ring, WorkQueue queue) {
  using Shape = GemmShape<kMode, kTokens>;
  constexpr bool kFp8 = Shape::kRoundsTokens;
  constexpr int kElementBytes = kFp8 ? 1 : 2;
  constexpr int kRounds = (kTokens + kRowsAtOnce - 1) / kRowsAtOnce;
  const int thread = thread_index() - 32, chunk = thread % 8, first = thread / 8;
  // Swizzled by hand: the chunk goes to chunk ^ (row % 8); 12 rows further, bit 2 of that flips.
  static_assert(kRowsAtOnce % 8 == 4, "swizzle of the rounds");
  const int place = first * 128 + ((chunk ^ (first & 7)) << 4);
  if (kUp) griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int scale_groups = kUp ? 1 : ceil_div(args.depth, 128);
  // A row of tokens starts at a multiple of 16 bytes: 32 bits reach 64 GiB.
  const auto row_vectors = static_cast<uint32_t>(args.token_stride * kElementBytes / 16);
  const auto token_row = [&](int position) { return kUp ? args.sorted_token[position] : position; };
  for (WorkTile tile = queue.pop(); tile.expert >= 0; tile = queue.pop()) {
    // Columns past the tile's count hold the last token or old bytes, which only reach sums that are never stored.
    // Nearly full tiles copy all rows, because a condition per row costs as much as its copy.
    if (!kUp) wait_for_rows(args, tile);
    const int rounds = tile.count > kTokens - 32 ? kRounds : ceil_div(tile.count, kRowsAtOnce);
    uint32_t vectors[kRounds];  // where the rows of this thread start
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {  // no conditions, so that all loads are in flight together
      const int n = first + j * kRowsAtOnce, last = tile.count - 1;
      vectors[j] = tile.count > 0 ? static_cast<uint32_t>(token_row(tile.begin + (n < last ? n : last))) : 0;
    }
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) vectors[j] *= row_vectors;
    constexpr int kScalesPerThread = kFp8 ? (kTokens + kTokenThreads - 1) / kTokenThreads : 1;
    uint32_t scale_rows[kScalesPerThread];
    MOEOPT_UNROLL
    for (int i = 0; i < kScalesPerThread; ++i) {
      const int n = thread + i * kTokenThreads;
      scale_rows[i] = kFp8 && n < tile.count ? static_cast<uint32_t>(token_row(tile.begin + n)) : kNoRow;
    }
    const unsigned char* from = static_cast<const unsigned char*>(args.tokens) + chunk * 16;
    const int length = Shape::kFourBits ? static_cast<int>(args.token_stride) : args.depth;
    int bytes_left = length * kElementBytes - chunk * 16;  // of the row
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait_parity(ring.empty + ring.stage, ring.parity ^ 1u);
      unsigned char* to = ring.data() + Shape::kWeightBytes + place;
      unsigned char* to_other = ring.data() + Shape::kWeightBytes + (place ^ 64);
      if (rounds == kRounds) {
        copy_rows<kTokens, kRounds, Shape::kTokenTiles>(kRounds, vectors, from, bytes_left, to, to_other);
      } else {
        copy_rows<kTokens, 0, Shape::kTokenTiles>(rounds, vectors, from, bytes_left, to, to_other);
      }
      from += 128 * Shape::kTokenTiles;
      bytes_left -= 128 * Shape::kTokenTiles;
      // kMxfp4 has them behind the exponents, and the ratios make all but the last group's superfluous.
      constexpr bool kMxfp4 = kMode == GemmMode::kMxfp4;
      auto* scales = reinterpret_cast<float*>(ring.data() + Shape::kScaleOffset +
                                              (kMxfp4 ? Shape::kBoxes * kBoxRows * Shape::kExponentBytes : 0));
      MOEOPT_UNROLL
      for (int i = 0; i < kScalesPerThread; ++i) {
        if (scale_rows[i] == kNoRow || ((kUp || kMxfp4) && step != num_steps - 1)) continue;
        const int group = kUp ? 0 : kMxfp4 ? scale_groups - 1 : step;
        const uint64_t source = static_cast<uint64_t>(scale_rows[i]) * scale_groups + group;
        cp_async_4(scales + token_scale_place(thread + i * kTokenThreads), args.token_scale + source);
      }
      cp_async_mbarrier_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

// One work tile by one math warpgroup: the products, then the epilogue. kColumns: how many of the kTokens columns of a
// stage are multiplied.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                 const ScalesBeside<kMode>& scales, const Staging& staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = staging.warpgroup;
  const int first0 = first_row<kUp>(row_tile, warpgroup, 0);
  const int first1 = first_row<kUp>(row_tile, warpgroup, 1);
  TileStages<kMode, kTokens, kUp> stages(args, ring, warpgroup);
  const bool beside = Shape::kTileScales && scales.used();
  LargestExponents largest;
  if constexpr (kMode == GemmMode::kMxfp4) {
    largest = LargestExponents::of_tile<kUp>(args, tile.expert, row_tile, warpgroup);
  }
  float sum0[kColumns / 2] = {}, sum1[kColumns / 2] = {};
  if constexpr (kMode == GemmMode::kBf16) {
    multiply_stages_bf16<kColumns>(stages, sum0, sum1);
  } else if constexpr (kMode == GemmMode::kFp8Weights) {
    multiply_stages_fp8_weights<kColumns>(stages, sum0, sum1);
  } else if constexpr (kMode == GemmMode::kMxfp4Weights) {
    if constexpr (Shape::kTileScales) {
      multiply_stages_of_four_bits<kColumns>(
          stages, ExponentsOfLane::of<kUp>(args, scales, beside, tile.expert, row_tile, warpgroup), sum0, sum1);
    } else {
      multiply_stages_of_four_bits<kColumns>(
          stages, StageExponentsOfLane::of<kUp>(args, tile.expert, row_tile, warpgroup), sum0, sum1);
    }
  } else if constexpr (kMode == GemmMode::kMxfp4) {
    multiply_stages_mxfp4<kColumns, !kUp>(stages, StageExponentsOfLane::of<kUp>(args, tile.expert, row_tile, warpgroup),
                                          largest, sum0, sum1);
  } else if constexpr (kMode == GemmMode::kInt4Weights) {
    multiply_stages_of_four_bits<kColumns>(
        stages, Int4FactorsOfLane::of<kUp>(args, scales, beside, tile.expert, row_tile, warpgroup), sum0, sum1);
  } else if constexpr (kColumns <= kExactColumns) {
    multiply_stages_fp8_narrow<kColumns, !kUp>(stages, sum0, sum1);
  } else {
    multiply_stages_fp8_wide<kColumns, !kUp>(stages, sum0, sum1);
  }
  if constexpr (kHasTileScales<kMode>) {
    if (beside) scales.release();
  }
  touch_all(sum0);
  touch_all(sum1);
  if (Shape::kMxfp4 || args.bias != nullptr || args.scale_kind == ScaleKind::kChannel) {
    constexpr bool kSpread = kWarpRows<kMode, kUp> == 32;
    const int rows0 = kSpread ? first_of_operand<kMode, kUp>(row_tile, warpgroup, 0) : first0;
    const int rows1 = kSpread ? first_of_operand<kMode, kUp>(row_tile, warpgroup, 1) : first1;
    if constexpr (kMode == GemmMode::kMxfp4) {
      add_row_terms(sum0, row_terms<kUp>(args, tile.expert, rows0, 0, largest));
      add_row_terms(sum1, row_terms<kUp>(args, tile.expert, rows1, 1, largest));
    } else {
      add_row_terms(sum0, row_terms<kMode, kUp>(args, tile.expert, rows0, 0));
      add_row_terms(sum1, row_terms<kMode, kUp>(args, tile.expert, rows1, 1));
    }
  }
  constexpr int kStaged = Shape::kStagedTokens;
  if constexpr (kUp) {
    if (args.activation == Activation::kSilu) {  // one branch per tile, not per value
      swiglu_sums(Activation::kSilu, sum0, sum1);
    } else {
      swiglu_sums(Activation::kSwigluOai, sum0, sum1);
    }
    if constexpr (Shape::kRoundsTokens) {
      store_quantized<kColumns, kStaged, Shape::kMxfp4>(args, tile, first0, sum0, staging);
    } else {
      constexpr RowOrder kOrder = kMode == GemmMode::kFp8Weights ? RowOrder::kFp8Weights
                                  : Shape::kFourBits             ? RowOrder::kMxfp4Weights
                                                                 : RowOrder::kPlain;
      store_tile<kColumns, kStaged, kOrder>(args, tile, first0, staging, sum0);
    }
  } else {
    store_tile<kColumns, kStaged, RowOrder::kPlain>(args, tile, first0, staging, sum0);
    store_tile<kColumns, kStaged, RowOrder::kPlain>(args, tile, first1, staging, sum1);
  }
}

// Multiplies with the narrowest compiled width that holds the tile's tokens: fewer columns, less arithmetic.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_narrowest(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                      const ScalesBeside<kMode>& scales, const Staging& staging) {
  constexpr int kNarrower = kNarrowerColumns<kTokens, kColumns>;
  if constexpr (kNarrower > 0) {
    if (tile.count <= kNarrower) {
      multiply_narrowest<kMode, kTokens, kNarrower, kUp>(args, tile, row_tile, ring, scales, staging);
      return;
    }
  }
  multiply_tile<kMode, kTokens, kColumns, kUp>(args, tile, row_tile, ring, scales, staging);
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void multiply_tiles(const GemmArgs& args, GemmRing ring, WorkQueue queue, ScalesBeside<kMode> scales,
                                  const Staging& staging) {
  const bool beside = GemmShape<kMode, kTokens>::kTileScales && scales.used();
  if (kUp) griddepcontrol_wait();
  for (WorkTile work = queue.pop(); work.expert >= 0; work = queue.pop()) {
    if constexpr (kHasTileScales<kMode>) {
      if (beside) mbarrier_wait_parity(scales.full(), scales.parity);
    }
    multiply_narrowest<kMode, kTokens, kTokens, kUp>(args, work.tile(), work.row_tile, ring, scales, staging);
    if constexpr (kHasTileScales<kMode>) {
      if (beside) scales.advance();
    }
  }
  if constexpr (kUp) {
    bar_warp_sync();  // all lanes have stored
    if (thread_index() % 32 == 0) mbarrier_arrive_cluster(queue.math_done, args.paired ? cluster_ctarank() : 0);
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kGemmThreads, 1)
    grouped_gemm_kernel(const MOEOPT_GRID_CONSTANT TensorMap map0, const MOEOPT_GRID_CONSTANT TensorMap map1,
                        const MOEOPT_GRID_CONSTANT GemmArgs args) {
  using Shape = GemmShape<kMode, kTokens>;
  MOEOPT_SHARED_BASE(shared);
  const int stage_bytes = Shape::kTileScales && args.scale_buffers > 0 ? Shape::kStageBytesBeside : Shape::kStageBytes;
  unsigned char* const buffers = shared + args.num_stages * stage_bytes;
  unsigned char* after_ring = buffers;
  if constexpr (Shape::kTileScales) after_ring += args.scale_buffers * args.scale_buffer_bytes;
  const WorkQueue queue(after_ring + 2 * Shape::kStagingBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(after_ring + 2 * Shape::kStagingBytes + kQueueBytes);
  const ScalesBeside<kMode> tile_scales(args, buffers, barriers + 2 * args.num_stages);
  if (thread_index() == 0) {
    prefetch_tensormap(&map0);
    prefetch_tensormap(&map1);
    for (int s = 0; s < args.num_stages; ++s) {
      mbarrier_init(barriers + s, kProducerThreads + 1 + (kHasMxfp4Ratios<kMode, kUp> ? 32 : 0));
      mbarrier_init(barriers + args.num_stages + s, (args.paired ? 2 : 1) * (kGemmThreads - kProducerThreads) / 32);
    }
    for (int place = 0; place < kQueueSlots; ++place) mbarrier_init(queue.full + place, 1);
    mbarrier_init(queue.math_done, (kGemmThreads - kProducerThreads) / 32);
    if constexpr (kHasTileScales<kMode>) {
      for (int b = 0; Shape::kTileScales && b < args.scale_buffers; ++b) {
        mbarrier_init(tile_scales.barriers + b, 1);
        mbarrier_init(tile_scales.barriers + kMostScaleBuffers + b, (kGemmThreads - kProducerThreads) / 32);
      }
    }
    fence_mbarrier_init();
  }
  if (args.paired) {
    barrier_cluster_sync();
  } else {
    bar_sync();
  }
  const GemmRing ring(shared, barriers, args.num_stages, stage_bytes);
  if (thread_index() < kProducerThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    if (thread_index() < 32) {
      produce_weights<kMode, kTokens, kUp>(args, &map0, &map1, ring, queue, tile_scales);
    } else {
      produce_tokens<kMode, kTokens, kUp>(args, ring, queue);
    }
  } else {
    setmaxnreg_inc<kMathRegisters>();
    const Staging staging = {after_ring, shfl_idx(thread_index() / 128, 0) - 1, Shape::kStagingBytes,
                             Shape::kStagedTokens};
    multiply_tiles<kMode, kTokens, kUp>(args, ring, queue, tile_scales, staging);
  }
  if (args.paired) barrier_cluster_sync();  // the other block may still arrive at barriers of this one
}

}  // namespace moeopt
