// Grouped GEMM of the experts for middle and large batches: persistent, warp-specialised, weights as the 64-row operand.
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
// Token tiles come from the routing kernel's table, so the host never reads a count. Consecutive tasks are the row
// tiles of one token tile; token tiles of one expert are neighbours, so its weights are in L2 for the second. A block
// takes the next task when it is near the end of one: tiles differ in width, and blocks in how fast they get memory.
//
// In pairs (args.paired; clusters of two blocks): the blocks take two token tiles of one expert and the same weight
// rows, and each asks for one of the two boxes, for both. A third less is read from L2, which is what bounds BF16.
//
//   block 0  box 0 ──TMA, multicast──┬──► A of block 0 ──► its tokens               empty[stage] of either block opens
//   block 1  box 1 ──TMA, multicast──┴──► A of block 1 ──► its tokens               after the math warps of both
//
// Modes: BF16 x BF16. FP8 weights x BF16 tokens: weights pass through registers, E4M3 to BF16 on the way, tokens
// permuted by prepare_tokens.cuh. FP8 x FP8: scales of the weights, and of h, applied to FP32 partial sums per 128 of
// K; x has one scale per token, applied to the sums (grouped_gemm_products.cuh).
//
// Barriers: full opens with 128 + 1 arrivals (of every producer thread, once its copies have landed, and of thread 0 with
// the TMA byte count); empty with 8 (one per math warp), in pairs 16; dealt, of a task, with 1. Producers wait for tasks
// and empty stages, math warps for tasks and full ones. What cp.async wrote is made visible to the tensor cores by the
// math warps' fence behind their wait. A pair's copies may land before this block expects their bytes: the phase stays
// open, for want of the arrival that expects them.
//
// Programmatic dependent launch: kDown starts where kUp has no tasks left, fills its ring with weights, and waits for h
// tile by tile: kUp counts the row tiles of each token tile (TokenTile::rows_made).
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/grouped_gemm_epilogue.cuh"
#include "moeopt/grouped_gemm_products.cuh"
#include "moeopt/grouped_gemm_shape.cuh"

namespace moeopt {

// The weights of one stage, by one thread; in a pair half of them, for both blocks.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void copy_weights(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1,
                                const GemmRing& ring, int expert, int row_tile, int step) {
  using Shape = GemmShape<kMode, kTokens>;
  uint64_t* full = ring.full + ring.stage;
  mbarrier_arrive_expect_bytes(full, Shape::kWeightBytes);
  const int x = step * Shape::kDepth;
  if (args.paired) {
    const int box = cluster_rank();
    tensor_copy_to_both(ring.data() + box * kBoxBytes, box ? map1 : map0, x, box_row<kUp>(row_tile, box), expert, full);
  } else if (args.weights_once) {
    tensor_copy_once(ring.data(), map0, x, box_row<kUp>(row_tile, 0), expert, full);
    tensor_copy_once(ring.data() + kBoxBytes, map1, x, box_row<kUp>(row_tile, 1), expert, full);
  } else {
    tensor_copy(ring.data(), map0, x, box_row<kUp>(row_tile, 0), expert, full);
    tensor_copy(ring.data() + kBoxBytes, map1, x, box_row<kUp>(row_tile, 1), expert, full);
  }
}

// Fills the empty ring with the first task's weights, which no earlier launch writes; returns how many stages. The
// routing is complete: the launch between it and this one waited for it before it let this one start.
template <GemmMode kMode, int kTokens>
MOEOPT_DEVICE int copy_first_weights(const GemmArgs& args, const TensorMap* map, GemmRing ring) {
  using Shape = GemmShape<kMode, kTokens>;
  const GemmTasks<false> tasks(args);
  if (tasks.first() >= tasks.count) return 0;
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int ahead = num_steps < args.num_stages ? num_steps : args.num_stages;
  if (thread_index() == 0) {
    const GemmTask task = tasks.at(tasks.first(), 0);  // both tiles of a pair have one expert
    for (int step = 0; step < ahead; ++step) {
      copy_weights<kMode, kTokens, false>(args, map, map, ring, task.expert, task.row_tile, step);
      ring.advance();
    }
  }
  return ahead;
}

// What the first producer warp writes into the stages beside the weights: the scales of their blocks, and in wide FP8
// tiles of kDown how the scale of each token changes from the 128 of K before. It is read from L2 a step ahead.
template <GemmMode kMode, int kTokens, bool kUp>
struct StageScales {
  static constexpr bool kHasFactors = kMode != GemmMode::kBf16;
  static constexpr bool kHasRatios = kMode == GemmMode::kFp8 && !kUp && kTokens > kExactColumns;
  static constexpr int kPerLane = kHasRatios ? (kTokens + 31) / 32 : 1;

  const float* factor_source = nullptr;
  const float* token_scale;
  int groups, columns;  // columns: 0 where nobody asks for ratios
  float factor = 1.0f, now[kPerLane], before[kPerLane];

  MOEOPT_DEVICE StageScales(const GemmArgs& args, const TokenTile& tile, int row_tile)
      : groups(ceil_div(args.depth, 128)), columns(kHasRatios && (kHalfColumns<kTokens> > kExactColumns || tile.count > kHalfColumns<kTokens>) ? tile.count : 0) {
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
    if (factor_source != nullptr) factor = load_constant(factor_source + step);
    MOEOPT_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int n = thread_index() + 32 * i;
      now[i] = n < columns ? load_shared_across_blocks(token_scale + n * groups + step) : 1.0f;
    }
  }

  MOEOPT_DEVICE void store(float* scales) {
    if (factor_source != nullptr) scales[kFactorOffset + thread_index()] = factor;
    MOEOPT_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int n = thread_index() + 32 * i;
      if (n < columns) scales[kRatioOffset + token_scale_place(n)] = before[i] * reciprocal_fast(now[i]);
      before[i] = now[i];
    }
  }
};

// What the first lane of the weights' warp of a cluster's first block does beside: it deals the tasks, each when the one
// before it begins, and asks which the one after it will be, so that nobody waits for the answer.
template <bool kUp>
struct TaskDealer {
  GemmTasks<kUp> tasks;
  TaskQueue queue;
  int next;

  MOEOPT_DEVICE TaskDealer(const GemmArgs& args, const TaskQueue& queue_)
      : tasks(args), queue(queue_), next(tasks.second()) {}
  MOEOPT_DEVICE void deal(int task) {
    if (tasks.blocks() == 1) {
      queue.deal(tasks.at(task, 0));
    } else {
      for (int rank = 0; rank < 2; ++rank) queue.deal_in_pair(tasks.at(task, rank), rank);
    }
    queue.advance();
  }
  MOEOPT_DEVICE void deal_next() {
    deal(next);
    next = tasks.ask();
  }
};

// What the first lane of the weights' warp of gate+up says to the next launch: that a row tile of h is there. Its math
// warps are known to have stored a tile when they release a stage of the one behind it, so none of them says anything,
// or waits for its stores, but at the end. Between the release and the weights' warp lie the stages of the ring.
struct TileSignals {
  const GemmArgs& args;
  TaskQueue queue;
  int steps_left, num_steps;  // until the oldest tile that nobody was told of is stored

  MOEOPT_DEVICE TileSignals(const GemmArgs& args_, const TaskQueue& queue_, int num_steps_)
      : args(args_), queue(queue_), steps_left(args_.num_stages + num_steps_), num_steps(num_steps_) {}
  // After the wait for the stage of one more step.
  MOEOPT_DEVICE void step() {
    if (steps_left-- > 0) return;
    add_released(&args.tiles[queue.take().token_tile].rows_made, 1);
    steps_left += num_steps;
  }
  MOEOPT_DEVICE void end() {
    mbarrier_wait(queue.ended, 0);
    for (GemmTask task = queue.take(); task.expert >= 0; task = queue.take()) {
      add_released(&args.tiles[task.token_tile].rows_made, 1);
    }
  }
};

// Returns once h of the token tile is there. The blocks that make it run: no block of this launch starts before all of
// that one have.
MOEOPT_DEVICE void wait_for_rows(const GemmArgs& args, const GemmTask& task) {
  wait_released(&args.tiles[task.token_tile].rows_made, ceil_div(args.depth, kBoxRows));
}

// The first producer warp: weights, and the scales beside them.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_weights(const GemmArgs& args, const TensorMap* map0, const TensorMap* map1, GemmRing ring,
                                   TaskQueue queue) {
  using Shape = GemmShape<kMode, kTokens>;
  int ahead = kUp ? 0 : copy_first_weights<kMode, kTokens>(args, map0, ring);
  if (kUp) wait_for_previous_kernel();
  launch_dependents();  // kUp: after the wait, see copy_first_weights
  const int num_steps = ceil_div(args.depth, Shape::kDepth), lane = thread_index();
  const bool deals = lane == 0 && (!args.paired || cluster_rank() == 0);
  TaskDealer<kUp> dealer(args, queue);
  TileSignals signals(args, queue, num_steps);
  if (deals) dealer.deal(dealer.tasks.first());
  for (GemmTask task = queue.take(); task.expert >= 0; task = queue.take()) {
    if (StageScales<kMode, kTokens, kUp>::kHasRatios) wait_for_rows(args, task);
    StageScales<kMode, kTokens, kUp> scales(args, task.tile(), task.row_tile);
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1u);
      if (ahead > 0) {
        --ahead;
      } else if (lane == 0) {
        copy_weights<kMode, kTokens, kUp>(args, map0, map1, ring, task.expert, task.row_tile, step);
      }
      scales.store(reinterpret_cast<float*>(ring.data() + Shape::kScaleOffset));
      mbarrier_arrive_at(ring.full + ring.stage, args.paired ? cluster_rank() : 0);
      ring.advance();
      if (step == 0 && deals) dealer.deal_next();
      if (kUp && lane == 0) signals.step();
      if (step < num_steps - 1) scales.load(step + 1);
    }
  }
  if (kUp && lane == 0) signals.end();
  if (!kUp) wait_for_previous_kernel();  // which has made all h, but may not have ended: what follows waits for both
}

constexpr uint32_t kNoRow = 0xffffffffu;
constexpr int kTokenThreads = kProducerThreads - 32;
constexpr int kRowsAtOnce = kTokenThreads / 8;

// A thread's 16 bytes of `rounds` rows in one stage. kSure: at least so many rounds.
template <int kTokens, int kSure, int kTokenTiles, int kRounds>
MOEOPT_DEVICE void copy_rows(int rounds, const uint32_t (&vectors)[kRounds], const unsigned char* from, int bytes_left,
                             unsigned char* to, unsigned char* to_other) {
  MOEOPT_UNROLL
  for (int half = 0; half < kTokenTiles; ++half) {
    // Past the end of K the weights arrive as zeros, so must the tokens: 0 * NaN is not 0.
    const bool inside = bytes_left > half * 128;
    const unsigned char* source = inside ? from + half * 128 : from;
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {
      if (j >= kSure && j >= rounds) break;
      const int row = (thread_index() - 32) / 8 + j * kRowsAtOnce;
      if ((j + 1) * kRowsAtOnce > kTokens && row >= kTokens) break;
      async_copy16((j % 2 ? to_other : to) + (half * kTokens + j * kRowsAtOnce) * 128,
                   source + static_cast<uint64_t>(vectors[j]) * 16, inside);
    }
  }
}

// The other producer warps: tokens, and their scales. 8 threads take a row of 128 bytes, all of them kRowsAtOnce rows.
template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void produce_tokens(const GemmArgs& args, GemmRing ring, TaskQueue queue) {
  using Shape = GemmShape<kMode, kTokens>;
  constexpr bool kFp8 = kMode == GemmMode::kFp8;
  constexpr int kElementBytes = kFp8 ? 1 : 2;
  constexpr int kRounds = (kTokens + kRowsAtOnce - 1) / kRowsAtOnce;
  const int thread = thread_index() - 32, chunk = thread % 8, first = thread / 8;
  // Swizzled by hand: the chunk's place is chunk ^ (row % 8), and 12 rows on bit 2 of that is the other one.
  static_assert(kRowsAtOnce % 8 == 4, "places of the rounds");
  const int place = first * 128 + ((chunk ^ (first & 7)) << 4);
  if (kUp) wait_for_previous_kernel();
  launch_dependents();
  const int num_steps = ceil_div(args.depth, Shape::kDepth);
  const int scale_groups = kUp ? 1 : ceil_div(args.depth, 128);
  // A row of tokens starts at a multiple of 16 bytes: 32 bits reach 64 GiB.
  const auto row_vectors = static_cast<uint32_t>(args.token_stride * kElementBytes / 16);
  const auto token_row = [&](int position) { return kUp ? args.sorted_token[position] : position; };
  for (GemmTask tile = queue.take(); tile.expert >= 0; tile = queue.take()) {
    // A column past the tile's count has the last token or old bytes: it only reaches sums that are never stored. Nearly
    // full tiles copy all rows, since a condition per row costs as much as its copy.
    if (!kUp) wait_for_rows(args, tile);
    const int rounds = tile.count > kTokens - 32 ? kRounds : ceil_div(tile.count, kRowsAtOnce);
    uint32_t vectors[kRounds];  // where the rows of this thread start
    MOEOPT_UNROLL
    for (int j = 0; j < kRounds; ++j) {  // without conditions: the loads wait for L2 together
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
    int bytes_left = args.depth * kElementBytes - chunk * 16;  // of the row
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1u);
      unsigned char* to = ring.data() + Shape::kWeightBytes + place;
      unsigned char* to_other = ring.data() + Shape::kWeightBytes + (place ^ 64);
      if (rounds == kRounds) {
        copy_rows<kTokens, kRounds, Shape::kTokenTiles>(kRounds, vectors, from, bytes_left, to, to_other);
      } else {
        copy_rows<kTokens, 0, Shape::kTokenTiles>(rounds, vectors, from, bytes_left, to, to_other);
      }
      from += 128 * Shape::kTokenTiles;
      bytes_left -= 128 * Shape::kTokenTiles;
      auto* scales = reinterpret_cast<float*>(ring.data() + Shape::kScaleOffset);
      MOEOPT_UNROLL
      for (int i = 0; i < kScalesPerThread; ++i) {
        if (scale_rows[i] == kNoRow || (kUp && step != num_steps - 1)) continue;
        const uint64_t source = static_cast<uint64_t>(scale_rows[i]) * scale_groups + (kUp ? 0 : step);
        async_copy4(scales + token_scale_place(thread + i * kTokenThreads), args.token_scale + source);
      }
      async_copies_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

// One tile by one math warpgroup: its part of the ring, then the epilogue. kColumns: of the kTokens that the stage has
// room for, those that are multiplied.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_tile(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                 const Staging& staging) {
  using Shape = GemmShape<kMode, kTokens>;
  const int warpgroup = staging.warpgroup;
  const int first0 = first_row<kUp>(row_tile, warpgroup, 0);
  const int first1 = first_row<kUp>(row_tile, warpgroup, 1);
  TileStages<kMode, kTokens, kUp> stages(args, ring, warpgroup);
  float sum0[kColumns / 2] = {}, sum1[kColumns / 2] = {};
  if constexpr (kMode == GemmMode::kBf16) {
    multiply_stages_bf16<kColumns>(stages, sum0, sum1);
  } else if constexpr (kMode == GemmMode::kFp8Weights) {
    multiply_stages_fp8_weights<kColumns>(stages, sum0, sum1);
  } else if constexpr (kColumns <= kExactColumns) {
    multiply_stages_fp8_narrow<kColumns, !kUp>(stages, sum0, sum1);
  } else {
    multiply_stages_fp8_wide<kColumns, !kUp>(stages, sum0, sum1);
  }
  touch_all(sum0);
  touch_all(sum1);
  if (args.bias != nullptr || args.scale_kind == ScaleKind::kChannel) {
    add_row_terms(sum0, row_terms<kUp>(args, tile.expert, first0, 0));
    add_row_terms(sum1, row_terms<kUp>(args, tile.expert, first1, 1));
  }
  constexpr int kStaged = Shape::kStagedTokens;
  if constexpr (kUp) {
    if (args.activation == Activation::kSilu) {  // once, not per value
      swiglu_sums(Activation::kSilu, sum0, sum1);
    } else {
      swiglu_sums(Activation::kSwigluOai, sum0, sum1);
    }
    if constexpr (kMode == GemmMode::kFp8) {
      store_quantized<kColumns, kStaged>(args, tile, first0, sum0, staging);
    } else {
      store_tile<kColumns, kStaged, kMode == GemmMode::kFp8Weights>(args, tile, first0, staging, sum0);
    }
  } else {
    store_tile<kColumns, kStaged, false>(args, tile, first0, staging, sum0);
    store_tile<kColumns, kStaged, false>(args, tile, first1, staging, sum1);
  }
}

// The narrowest compiled width that holds the tile's tokens: fewer columns, less arithmetic.
template <GemmMode kMode, int kTokens, int kColumns, bool kUp>
MOEOPT_DEVICE void multiply_narrowest(const GemmArgs& args, const TokenTile& tile, int row_tile, GemmRing& ring,
                                      const Staging& staging) {
  constexpr int kNarrower = kNarrowerColumns<kTokens, kColumns>;
  if constexpr (kNarrower > 0) {
    if (tile.count <= kNarrower) {
      multiply_narrowest<kMode, kTokens, kNarrower, kUp>(args, tile, row_tile, ring, staging);
      return;
    }
  }
  multiply_tile<kMode, kTokens, kColumns, kUp>(args, tile, row_tile, ring, staging);
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_DEVICE void multiply_tiles(const GemmArgs& args, GemmRing ring, TaskQueue queue, const Staging& staging) {
  if (kUp) wait_for_previous_kernel();
  for (GemmTask task = queue.take(); task.expert >= 0; task = queue.take()) {
    multiply_narrowest<kMode, kTokens, kTokens, kUp>(args, task.tile(), task.row_tile, ring, staging);
  }
  if constexpr (kUp) {
    sync_warp();  // all lanes have stored
    if (thread_index() % 32 == 0) mbarrier_arrive_at(queue.ended, args.paired ? cluster_rank() : 0);
  }
}

template <GemmMode kMode, int kTokens, bool kUp>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kGemmThreads, 1)
    grouped_gemm_kernel(const MOEOPT_GRID_CONSTANT TensorMap map0, const MOEOPT_GRID_CONSTANT TensorMap map1,
                        const MOEOPT_GRID_CONSTANT GemmArgs args) {
  using Shape = GemmShape<kMode, kTokens>;
  MOEOPT_SHARED_BASE(shared);
  unsigned char* after_ring = shared + args.num_stages * Shape::kStageBytes;
  const TaskQueue queue(after_ring + 2 * Shape::kStagingBytes);
  auto* barriers = reinterpret_cast<uint64_t*>(after_ring + 2 * Shape::kStagingBytes + kTaskQueueBytes);
  if (thread_index() == 0) {
    prefetch_tensor_map(&map0);
    prefetch_tensor_map(&map1);
    for (int s = 0; s < args.num_stages; ++s) {
      mbarrier_init(barriers + s, kProducerThreads + 1);
      mbarrier_init(barriers + args.num_stages + s, (args.paired ? 2 : 1) * (kGemmThreads - kProducerThreads) / 32);
    }
    for (int place = 0; place < kTaskPlaces; ++place) mbarrier_init(queue.dealt + place, 1);
    mbarrier_init(queue.ended, (kGemmThreads - kProducerThreads) / 32);
    fence_mbarrier_init();
  }
  if (args.paired) {
    sync_cluster();
  } else {
    sync_block();
  }
  const GemmRing ring(shared, barriers, args.num_stages, Shape::kStageBytes);
  if (thread_index() < kProducerThreads) {
    give_registers_back<kProducerRegisters>();
    if (thread_index() < 32) {
      produce_weights<kMode, kTokens, kUp>(args, &map0, &map1, ring, queue);
    } else {
      produce_tokens<kMode, kTokens, kUp>(args, ring, queue);
    }
  } else {
    take_registers<kMathRegisters>();
    const Staging staging = {after_ring, uniform(thread_index() / 128) - 1, Shape::kStagingBytes, Shape::kStagedTokens};
    multiply_tiles<kMode, kTokens, kUp>(args, ring, queue, staging);
  }
  if (args.paired) sync_cluster();  // the other block may still arrive at barriers of this one
}

}  // namespace moeopt
