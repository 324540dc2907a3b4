// Attention of one new token of each of few requests to the paged KV cache, in one launch: out[t, h] =
// softmax(scale q[t, h] K^T) V over the keys of request t, BF16, sums in FP32, weights rounded to BF16 for the product.
//
//   unit   16 neighbouring keys of a request with their values, all in one page; query heads of one KV head are the
//   rows
//          of mma.m16n8k16, up to 16 of them
//   part   neighbouring units of one request and one KV head, which one block computes, a unit of each warp at a time
//   ring of stages of each warp, a unit each: a bulk copy per key ──► mma ──► online softmax ──► mma ──► the warps'
//   sums in shared memory ──► part ──► the block of a request and head that arrives last merges the parts in fixed
//   order
//
// The grid is fixed, lengths are read on the device: the same captured launch serves any lengths. Each request has so
// many of the blocks as its share of all units, one at least; a block that is left over ends at once. Results have the
// same bits whichever block arrives last.
//
// Old keys are read before griddepcontrol_wait. That is safe because a launch that may still run then is the one right
// before this one: vLLM's and torch's let the next one start at their end, and those of ours that can stand there wait
// before they do. (The grouped GEMM of down does not, but a combine follows it.)
// That launch writes the new keys at most; lengths, block table, slots and older keys are written by copies and
// launches of before. The new key of a request, its last, is read after the wait, as are queries: from the cache, or
// from where the model has just made it, and is then stored in the cache here.
#pragma once

#include "moeopt/device.cuh"
#include "moeopt/paged_decode.h"
#include "moeopt/swiglu.cuh"

namespace moeopt {

constexpr int kDecodeTokens = 8;  // at most
constexpr int kDecodeHeads = 16;  // of a KV head, at most: the rows of a product
constexpr int kDecodeKeys = 16;   // of a unit
constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeStages = 3;      // of each warp, in flight before the first is multiplied
constexpr int kDecodeBlocks = 2;      // of a multiprocessor
constexpr int kDecodeLeastUnits = 4;  // of a part. Chosen: merging a part costs about as much as reading so many
constexpr int kDecodeMostParts = 64;  // of a request and KV head. Chosen: one block merges them
constexpr int kDecodeMergeChunk = 8;  // parts whose rows are in flight together
constexpr float kDecodeNothing = -__builtin_huge_valf();  // the maximum of no scores

template <int kHeadSize>
struct DecodeShape {
  static constexpr int kKeyBytes = 2 * kHeadSize * 2;  // the key and its value
  static constexpr int kPitch = kKeyBytes + 16;        // 8 neighbouring keys lie in different banks for ldmatrix
  static constexpr int kStageBytes = kDecodeKeys * kPitch;
  static constexpr int kRingBytes = kDecodeStages * kStageBytes;  // of a warp
  static constexpr int kSumPitch = kHeadSize + 8;                 // floats: the stores of a warp hit all banks
  static constexpr int kStatsBytes = kDecodeWarps * kDecodeHeads * 2 * 4;
  static constexpr int kSharedBytes = kDecodeWarps * kRingBytes + kStatsBytes + kDecodeWarps * kDecodeStages * 8 + 16;
  static_assert(kDecodeHeads * kSumPitch * 4 <= kRingBytes, "a warp's sums take the place of its ring");
  static_assert(kDecodeMostParts * kDecodeHeads * 2 * 4 <= kDecodeWarps * kRingBytes, "and so do all parts' maxima");
};

// What a block computes.
struct DecodePart {
  int token = -1, length = 0;  // -1: nothing
  int part = 0, parts = 0;     // of the request and KV head
};

// The part of block `block` of the `blocks` of a KV head. 1 + (blocks - T) share summed over requests is at most
// blocks. 32 bits hold all products of numbers of units: 2^24 keys, the most that is planned, are 2^20.
MOEOPT_DEVICE DecodePart decode_part(const PagedDecodeArgs& args, int blocks, int block) {
  const int tokens = static_cast<int>(args.num_tokens);
  int lengths[kDecodeTokens], total = 0;
  MOEOPT_UNROLL
  for (int t = 0; t < kDecodeTokens; ++t) {
    lengths[t] = t < tokens ? args.lengths[t] : 0;
    total += ceil_div(lengths[t], kDecodeKeys);
  }
  DecodePart found;
  int first = 0;
  MOEOPT_UNROLL
  for (int t = 0; t < kDecodeTokens; ++t) {
    if (t < tokens) {
      const int units = ceil_div(lengths[t], kDecodeKeys), wanted = ceil_div(units, kDecodeLeastUnits);
      int parts = total == 0 ? 1 : 1 + (blocks - tokens) * units / total;
      parts = parts < wanted ? parts : wanted;
      parts = parts < kDecodeMostParts ? parts : kDecodeMostParts;
      parts = parts > 1 ? parts : 1;
      if (block >= first && block < first + parts) found = DecodePart{t, lengths[t], block - first, parts};
      first += parts;
    }
  }
  return found;
}

// Over the four lanes of a quad.
MOEOPT_DEVICE float quad_max(float x) {
  float other = shfl_bfly(x, 1);
  x = x > other ? x : other;
  other = shfl_bfly(x, 2);
  return x > other ? x : other;
}
MOEOPT_DEVICE float quad_sum(float x) {
  x += shfl_bfly(x, 1);
  return x + shfl_bfly(x, 2);
}

struct alignas(16) DecodeSums {
  float x[4];
};

MOEOPT_DEVICE void add_scaled(DecodeSums& sums, const DecodeSums& more, float factor) {
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) sums.x[i] += factor * more.x[i];
}

MOEOPT_DEVICE void store_bf16(uint16_t* to, const DecodeSums& sums, float factor) {
  const uint32_t low = cvt_bf16x2_f32(sums.x[0] * factor, sums.x[1] * factor);
  const uint32_t high = cvt_bf16x2_f32(sums.x[2] * factor, sums.x[3] * factor);
  *reinterpret_cast<uint64_t*>(to) = static_cast<uint64_t>(high) << 32 | low;
}

// Merges the parts of a request and KV head. `stats`: maximum and sum of [part][head]; `rows`: [part][head][d].
template <int kHeadSize>
MOEOPT_DEVICE void merge_parts(const float* stats, const float* rows, int parts, int heads, float* shared_stats,
                               uint16_t* out, int64_t out_head_stride) {
  constexpr int kColumns = kHeadSize / 4;
  const int items = heads * kColumns;
  DecodeSums held[kDecodeMergeChunk];
  const auto load = [&](int item, int first) {
    MOEOPT_UNROLL
    for (int i = 0; i < kDecodeMergeChunk; ++i) {
      if (item >= items || first + i >= parts) continue;
      const Vec4 v = ld_global_cg_v4(rows + (static_cast<int64_t>(first + i) * items + item) * 4);
      held[i] = DecodeSums{{float_from_bits(v.x), float_from_bits(v.y), float_from_bits(v.z), float_from_bits(v.w)}};
    }
  };
  load(thread_index(), 0);  // in flight with the maxima
  for (int i = thread_index(); i < parts * heads * 2; i += kDecodeThreads) shared_stats[i] = ld_global_cg(stats + i);
  bar_sync();
  for (int item = thread_index(); item < items; item += kDecodeThreads) {
    const int head = item / kColumns, column = item % kColumns * 4;
    if (item != thread_index()) load(item, 0);
    float most = kDecodeNothing, weights = 0;
    for (int part = 0; part < parts; ++part) {
      const float of_part = shared_stats[(part * heads + head) * 2];
      most = of_part > most ? of_part : most;
    }
    DecodeSums sums{};
    for (int first = 0; first < parts; first += kDecodeMergeChunk) {
      if (first > 0) load(item, first);
      MOEOPT_UNROLL
      for (int i = 0; i < kDecodeMergeChunk; ++i) {
        if (first + i >= parts) continue;
        const float* const of_part = shared_stats + ((first + i) * heads + head) * 2;
        const float factor = exp2_approx(of_part[0] - most);
        weights += factor * of_part[1];
        add_scaled(sums, held[i], factor);
      }
    }
    store_bf16(out + head * out_head_stride + column, sums, 1.0f / weights);
  }
}

template <int kHeadSize>
MOEOPT_KERNEL void MOEOPT_BOUNDS(kDecodeThreads, kDecodeBlocks)
    paged_decode_kernel(const MOEOPT_GRID_CONSTANT PagedDecodeArgs args) {
  using Shape = DecodeShape<kHeadSize>;
  constexpr int kSteps = kHeadSize / 16;  // of a product over the head size
  MOEOPT_SHARED_BASE(shared);
  const int warp = thread_index() / 32, lane = thread_index() % 32, group = lane / 4, quad_lane = lane % 4;
  const int kv_heads = static_cast<int>(args.num_kv_heads), heads = static_cast<int>(args.num_heads) / kv_heads;
  const int blocks = grid_blocks() / kv_heads, kv_head = block_index() / blocks;
  const DecodePart mine = decode_part(args, blocks, block_index() % blocks);
  if (mine.token < 0) return;

  unsigned char* const ring = shared + warp * Shape::kRingBytes;
  float* const stats = reinterpret_cast<float*>(shared + kDecodeWarps * Shape::kRingBytes);  // [warp][head]: max, sum
  uint64_t* const all_full = reinterpret_cast<uint64_t*>(stats + kDecodeWarps * kDecodeHeads * 2);
  uint64_t* const full = all_full + warp * kDecodeStages;
  int* const is_last = reinterpret_cast<int*>(all_full + kDecodeWarps * kDecodeStages);
  const int all_units = ceil_div(mine.length, kDecodeKeys), last_key = mine.length - 1;
  const int first_unit = all_units * mine.part / mine.parts;
  const int units = all_units * (mine.part + 1) / mine.parts - first_unit;
  const int to_do = units > warp ? ceil_div(units - warp, kDecodeWarps) : 0;  // of this warp
  const int block_size = static_cast<int>(args.block_size);
  const auto unit_at = [&](int n) { return first_unit + warp + n * kDecodeWarps; };

  // Lane n has the page of the warp's unit n, then of 32 + n, and so on.
  const int* const table = args.block_table + mine.token * args.table_stride;
  const auto page_at = [&](int n) { return n < to_do ? table[unit_at(n) * kDecodeKeys / block_size] : 0; };
  int pages = page_at(lane);
  if (lane == 0) {
    for (int stage = 0; stage < kDecodeStages; ++stage) mbarrier_init(full + stage, 1);
    fence_mbarrier_init();
  }
  bar_warp_sync();
  const bool stores = args.new_keys != nullptr;
  const int slot = stores && all_units > 0 ? static_cast<int>(args.slots[mine.token]) : -1;
  const auto load_last = [&](unsigned char* to, const uint16_t* from, uint64_t* barrier) {
    if (!stores) return bulk_load_evict_first(to, from, Shape::kKeyBytes, barrier);
    bulk_load_evict_first(to, args.new_keys + mine.token * args.new_key_stride + kv_head * args.new_key_head_stride,
                          Shape::kKeyBytes / 2, barrier);
    bulk_load_evict_first(to + Shape::kKeyBytes / 2,
                          args.new_values + mine.token * args.new_value_stride + kv_head * args.new_value_head_stride,
                          Shape::kKeyBytes / 2, barrier);
  };
  const uint16_t* late_from = nullptr;  // the last key, if this lane copies it (also in place of keys beyond it)
  unsigned char* late_to = nullptr;
  uint64_t* late_full = nullptr;
  int loaded = 0;
  const auto load = [&](int stage, bool may_wait) {
    if (loaded == to_do) return;
    if (loaded % 32 == 0 && loaded > 0) pages = page_at(loaded + lane);
    const int first_key = unit_at(loaded) * kDecodeKeys;
    const int page = shfl_idx(pages, loaded % 32);
    ++loaded;
    if (lane == 0) mbarrier_arrive_expect_tx(full + stage, kDecodeKeys * Shape::kKeyBytes);
    bar_warp_sync();
    if (lane >= kDecodeKeys) return;
    // Beyond the end the last key again: what is masked must still be a number.
    const int key = first_key + lane < last_key ? first_key + lane : last_key;
    const uint16_t* const from =
        args.cache + page * args.block_stride + kv_head * args.head_stride + key % block_size * args.key_stride;
    unsigned char* const to = ring + stage * Shape::kStageBytes + lane * Shape::kPitch;
    if (key < last_key) {
      bulk_load_evict_first(to, from, Shape::kKeyBytes, full + stage);
    } else if (may_wait) {
      load_last(to, from, full + stage);
    } else {
      late_from = from;
      late_to = to;
      late_full = full + stage;
    }
  };
  MOEOPT_UNROLL
  for (int stage = 0; stage < kDecodeStages; ++stage) load(stage, false);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // after the wait, so that what this one counts on holds for the next one
  if (late_from != nullptr) load_last(late_to, late_from, late_full);

  uint32_t q[kSteps][4];
  MOEOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int head = group + 8 * (i % 2);
    const uint16_t* const row = args.q + mine.token * args.q_stride + (kv_head * heads + head) * args.q_head_stride;
    MOEOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int column = step * 16 + 8 * (i / 2) + 2 * quad_lane;
      q[step][i] = head < heads ? *reinterpret_cast<const uint32_t*>(row + column) : 0;
    }
  }
  const float scale = args.scale * 1.4426950408889634f;  // log2(e): powers of two are faster than of e
  float out[kHeadSize / 8][4] = {}, most[2] = {kDecodeNothing, kDecodeNothing}, weights[2] = {};  // of rows g and g + 8
  // What a lane gives ldmatrix the address of: of keys the row lane % 8 of matrix lane / 8; of values likewise.
  const int key_offset = (lane / 16 * 8 + lane % 8) * Shape::kPitch + lane / 8 % 2 * 16;
  const int value_offset = (lane / 8 % 2 * 8 + lane % 8) * Shape::kPitch + lane / 16 * 16 + kHeadSize * 2;
  for (int n = 0, stage = 0, parity = 0; n < to_do; ++n) {
    mbarrier_wait_parity(full + stage, static_cast<uint32_t>(parity));
    const unsigned char* const unit = ring + stage * Shape::kStageBytes;
    if (slot >= 0 && unit_at(n) == all_units - 1 && lane < Shape::kKeyBytes / 16) {
      uint16_t* const to = args.cache + slot / block_size * args.block_stride + kv_head * args.head_stride +
                           slot % block_size * args.key_stride;
      reinterpret_cast<Vec4*>(to)[lane] =
          *reinterpret_cast<const Vec4*>(unit + last_key % kDecodeKeys * Shape::kPitch + lane * 16);
    }
    float scores[2][2][4] = {};  // [chain of products][keys 0 to 7, 8 to 15]
    MOEOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t k[4];
      ldmatrix_x4(k, unit + key_offset + step * 32);
      MOEOPT_UNROLL
      for (int j = 0; j < 2; ++j) {
        mma_m16n8k16(scores[step % 2][j], q[step][0], q[step][1], q[step][2], q[step][3], k[2 * j], k[2 * j + 1]);
      }
    }
    const int first_key = unit_at(n) * kDecodeKeys + 2 * quad_lane;
    float p[2][4], highest[2] = {most[0], most[1]};
    MOEOPT_UNROLL
    for (int j = 0; j < 2; ++j) {
      MOEOPT_UNROLL
      for (int r = 0; r < 4; ++r) {
        const float score = (scores[0][j][r] + scores[1][j][r]) * scale;
        p[j][r] = first_key + 8 * j + r % 2 <= last_key ? score : kDecodeNothing;
        highest[r / 2] = p[j][r] > highest[r / 2] ? p[j][r] : highest[r / 2];
      }
    }
    MOEOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      highest[half] = quad_max(highest[half]);
      const float factor = exp2_approx(most[half] - highest[half]);  // 0 at the first unit
      most[half] = highest[half];
      weights[half] *= factor;
      MOEOPT_UNROLL
      for (int column = 0; column < kHeadSize / 8; ++column) {
        out[column][2 * half] *= factor;
        out[column][2 * half + 1] *= factor;
      }
    }
    MOEOPT_UNROLL
    for (int j = 0; j < 2; ++j) {
      MOEOPT_UNROLL
      for (int r = 0; r < 4; ++r) {
        p[j][r] = exp2_approx(p[j][r] - most[r / 2]);
        weights[r / 2] += p[j][r];
      }
    }
    const uint32_t a[4] = {cvt_bf16x2_f32(p[0][0], p[0][1]), cvt_bf16x2_f32(p[0][2], p[0][3]),
                           cvt_bf16x2_f32(p[1][0], p[1][1]), cvt_bf16x2_f32(p[1][2], p[1][3])};
    MOEOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, unit + value_offset + step * 32);
      mma_m16n8k16(out[2 * step], a[0], a[1], a[2], a[3], v[0], v[1]);
      mma_m16n8k16(out[2 * step + 1], a[0], a[1], a[2], a[3], v[2], v[3]);
    }
    if (loaded < to_do) {
      fence_proxy_async();  // what was read here is written by the copy engine next
      bar_warp_sync();
      load(stage, true);
    }
    if (++stage == kDecodeStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  bar_warp_sync();  // all lanes have read the ring, where the sums of this warp go
  MOEOPT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int head = group + 8 * half;
    const float sum = quad_sum(weights[half]);
    if (head >= heads || to_do == 0) continue;
    float* const row = reinterpret_cast<float*>(ring) + head * Shape::kSumPitch + 2 * quad_lane;
    MOEOPT_UNROLL
    for (int column = 0; column < kHeadSize / 8; ++column) {
      row[column * 8] = out[column][2 * half];
      row[column * 8 + 1] = out[column][2 * half + 1];
    }
    if (quad_lane == 0) {
      stats[(warp * kDecodeHeads + head) * 2] = most[half];
      stats[(warp * kDecodeHeads + head) * 2 + 1] = sum;
    }
  }
  bar_sync();

  // Parts of one request and KV head lie one after the other; those of idle blocks stay unused.
  const int items = heads * (kHeadSize / 4), first_part = block_index() - mine.part;
  float* const all_stats = args.workspace + static_cast<int64_t>(grid_blocks()) * items * 4;
  uint16_t* const out_rows = args.out + mine.token * args.out_stride + kv_head * heads * args.out_head_stride;
  const int warps = units < kDecodeWarps ? units : kDecodeWarps;  // that had a unit
  for (int item = thread_index(); item < items; item += kDecodeThreads) {
    const int head = item / (kHeadSize / 4), column = item % (kHeadSize / 4) * 4;
    float highest = kDecodeNothing, sum = 0;
    for (int w = 0; w < warps; ++w) {
      const float of_warp = stats[(w * kDecodeHeads + head) * 2];
      highest = of_warp > highest ? of_warp : highest;
    }
    DecodeSums sums{};
    for (int w = 0; w < warps; ++w) {
      const float* const of_warp = stats + (w * kDecodeHeads + head) * 2;
      const float factor = exp2_approx(of_warp[0] - highest);
      sum += factor * of_warp[1];
      const float* const row = reinterpret_cast<const float*>(shared + w * Shape::kRingBytes) + head * Shape::kSumPitch;
      add_scaled(sums, *reinterpret_cast<const DecodeSums*>(row + column), factor);
    }
    if (mine.parts == 1) {  // without a request: 0
      store_bf16(out_rows + head * args.out_head_stride + column, sums, units == 0 ? 0.0f : 1.0f / sum);
      continue;
    }
    *reinterpret_cast<DecodeSums*>(args.workspace + (static_cast<int64_t>(block_index()) * items + item) * 4) = sums;
    if (column == 0) {
      all_stats[(block_index() * heads + head) * 2] = highest;
      all_stats[(block_index() * heads + head) * 2 + 1] = sum;
    }
  }
  if (mine.parts == 1) return;

  bar_sync();
  if (thread_index() == 0) {
    int* const arrived = args.arrived + kv_head * args.num_tokens + mine.token;
    fence_acq_rel_gpu();  // releases what all threads of this block have stored, acquires what earlier blocks have
    *is_last = atom_add_global(arrived, 1) == mine.parts - 1;
    fence_acq_rel_gpu();
    if (*is_last) *arrived = 0;
  }
  bar_sync();
  if (!*is_last) return;
  merge_parts<kHeadSize>(all_stats + first_part * heads * 2,
                         args.workspace + static_cast<int64_t>(first_part) * items * 4, mine.parts, heads,
                         reinterpret_cast<float*>(shared), out_rows, args.out_head_stride);
}

}  // namespace moeopt
