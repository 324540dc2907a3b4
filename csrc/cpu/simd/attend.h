// Attention of the query heads that share a key/value head over a span of keys, in FP32.
//
//   q [head, d] (x scale) --+-- 4 keys x 2 heads --> scores [head, kTileKeys] -- exp(score - largest) --+
//   key rows, by page ------+                                                                           |
//   value rows, by page ------------------------------------- 4 registers of d x 2 heads -- sums [head, d]
//
// A tile of keys at a time; a larger score than before shrinks what was summed so far. Pages lie anywhere, and a row is
// shorter than what a processor fetches ahead by itself: while a tile is computed, the keys and values of the next one
// are fetched into the L2 cache, which can wait for more lines than L1. `Simd` is an instruction set (activation.h).
// Internal linkage: see number_formats.h.
#pragma once

#include <math.h>

#include <cstring>
#include <type_traits>

#include "../attention_kernels.h"
#include "activation.h"
#include "load_fp32.h"

namespace moeopt {
namespace {

constexpr int kKeysAtOnce = 4;     // store_sums adds up the lanes of four registers
constexpr int kHeadsAtOnce = 2;    // 8 sums, 2 queries and a key: they fit 16 registers
constexpr int kVectorsAtOnce = 4;  // 8 sums, 4 values and 2 weights
constexpr int64_t kLeastTileKeys = 16;
constexpr int64_t kTileBytes = 1 << 16;  // of its keys, and again of its values

// Where the keys of a tile lie for key/value head 0, as elements from the beginning of the cache. Filled up with the
// last one.
struct TileRows {
  int64_t offset[kTileKeys];
  int64_t count;

  // At most `most` keys from `first` on; none behind the span.
  TileRows(const PagedAttentionArgs& args, const KeySpan& span, int64_t first, int64_t most) {
    const int32_t* table = args.block_tables + span.sequence * args.table_stride;
    count = span.end - first < most ? span.end - first : most;
    if (count <= 0) return;
    int64_t block = first / args.block_size, place = first % args.block_size;
    for (int64_t n = 0; n < count; ++n) {
      offset[n] = (table[block] * args.block_size + place) * args.num_kv_heads * args.head_size;
      if (++place == args.block_size) ++block, place = 0;
    }
    for (int64_t n = count; n % kKeysAtOnce; ++n) offset[n] = offset[count - 1];
  }
};

// Keys of a tile: fewer where a row of all heads is long, so that two tiles fit the L2 cache.
template <typename T>
int64_t tile_keys(const PagedAttentionArgs& args) {
  const int64_t row_bytes = args.num_kv_heads * args.head_size * static_cast<int64_t>(sizeof(T));
  int64_t keys = kTileKeys;
  while (keys > kLeastTileKeys && keys * row_bytes > kTileBytes) keys /= 2;
  return keys;
}

// Rows to fetch into the L2 cache: those of `rows` from `first` on; null: none.
template <typename T>
struct RowsAhead {
  const T* first;
  const TileRows* rows;

  void fetch(int64_t n, int64_t d) const {
    if (!first || n >= rows->count) return;
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    for (int64_t k = 0; k < d; k += kLine) __builtin_prefetch(first + rows->offset[n] + k, 0, 2);
  }
};

// scores[i, n] = q[i] . key n, for kHeads heads. Rows of q are `padded` apart, zeros behind d.
template <typename Simd, typename T, int kHeads>
void score(const float* q, int64_t padded, const T* keys, const TileRows& rows, int64_t d, RowsAhead<T> ahead,
           float* scores) {
  using Vec = typename Simd::Vec;
  const int64_t whole = d / Simd::kLanes * Simd::kLanes;
  for (int64_t n = 0; n < rows.count; n += kKeysAtOnce) {
    for (int j = 0; j < kKeysAtOnce; ++j) ahead.fetch(n + j, d);
    const T* key[kKeysAtOnce];
    for (int j = 0; j < kKeysAtOnce; ++j) key[j] = keys + rows.offset[n + j];
    Vec sums[kHeads][kKeysAtOnce];
    for (int i = 0; i < kHeads; ++i) {
      for (int j = 0; j < kKeysAtOnce; ++j) sums[i][j] = Simd::set1(0.0f);
    }
    const auto add = [&](int64_t k, auto load) {
      Vec query[kHeads];
      for (int i = 0; i < kHeads; ++i) query[i] = Simd::load(q + i * padded + k);
      for (int j = 0; j < kKeysAtOnce; ++j) {
        const Vec values = load(key[j] + k);
        for (int i = 0; i < kHeads; ++i) sums[i][j] = Simd::fmadd(query[i], values, sums[i][j]);
      }
    };
    for (int64_t k = 0; k < whole; k += Simd::kLanes) add(k, [](const T* p) { return load_as_fp32<Simd>(p); });
    if (whole < d) add(whole, [&](const T* p) { return load_part<Simd>(p, d - whole); });
    for (int i = 0; i < kHeads; ++i) Simd::store_sums(sums[i], scores + i * kTileKeys + n);
  }
}

// sums[i, column..] = sums * shrink[i] + weights[i] . values, for kHeads heads and kVectors registers of columns.
// `columns`: how many of them exist, which may be fewer with one register. `d`: of the rows ahead.
template <typename Simd, typename T, int kHeads, int kVectors>
void weigh(const float* weights, const float* shrink, const T* values, const TileRows& rows, int64_t columns,
           int64_t padded, RowsAhead<T> ahead, int64_t d, float* sums) {
  using Vec = typename Simd::Vec;
  constexpr int64_t kLanes = Simd::kLanes;
  const bool whole = columns >= kVectors * kLanes;
  Vec sum[kHeads][kVectors];
  for (int i = 0; i < kHeads; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = Simd::load(sums + i * padded + v * kLanes) * Simd::set1(shrink[i]);
    }
  }
  const auto add = [&](auto load) {
    for (int64_t n = 0; n < rows.count; ++n) {
      ahead.fetch(n, d);
      Vec value[kVectors];
      for (int v = 0; v < kVectors; ++v) value[v] = load(values + rows.offset[n] + v * kLanes);
      for (int i = 0; i < kHeads; ++i) {
        const Vec weight = Simd::set1(weights[i * kTileKeys + n]);
        for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::fmadd(weight, value[v], sum[i][v]);
      }
    }
  };
  if (whole) {
    add([](const T* p) { return load_as_fp32<Simd>(p); });
  } else {
    add([&](const T* p) { return load_part<Simd>(p, columns); });
  }
  for (int i = 0; i < kHeads; ++i) {
    for (int v = 0; v < kVectors; ++v) Simd::store(sums + i * padded + v * kLanes, sum[i][v]);
  }
}

// Turns the scores of a head into weights. Returns the factor of what was summed before.
template <typename Simd>
float soften(float* scores, int64_t count, float* largest, float* total) {
  using Vec = typename Simd::Vec;
  constexpr int64_t kLanes = Simd::kLanes;
  for (int64_t n = count; n % kLanes; ++n) scores[n] = -INFINITY;
  Vec most = Simd::set1(*largest);
  for (int64_t n = 0; n < count; n += kLanes) most = Simd::max(Simd::load(scores + n), most);
  float lanes[kLanes];
  Simd::store(lanes, most);
  float now = lanes[0];
  for (int64_t n = 1; n < kLanes; ++n) now = lanes[n] > now ? lanes[n] : now;
  const Vec shift = Simd::set1(now);
  Vec sums = Simd::set1(0.0f);
  for (int64_t n = 0; n < count; n += kLanes) {
    const Vec weight = exponential<Simd>(Simd::load(scores + n) - shift);
    Simd::store(scores + n, weight);
    sums = sums + weight;
  }
  Simd::store(lanes, sums);
  float sum = 0.0f;
  for (int64_t n = 0; n < kLanes; ++n) sum += lanes[n];
  const float shrink = *total == 0.0f ? 0.0f : expf(*largest - now);
  *total = *total * shrink + sum;
  *largest = now;
  return shrink;
}

// Query heads [0, kHeads) of a tile and a key/value head. `next`: the tile behind it, to be fetched meanwhile, or null.
template <typename Simd, typename T, int kHeads>
void attend_tile(const PagedAttentionArgs& args, int64_t kv_head, const TileRows& rows, const TileRows* next,
                 const float* q, int64_t padded, float* scores, float* largest, float* total, float* sums) {
  const int64_t d = args.head_size;
  const T* keys = static_cast<const T*>(args.keys) + kv_head * d;
  const T* values = static_cast<const T*>(args.values) + kv_head * d;
  score<Simd, T, kHeads>(q, padded, keys, rows, d, {next ? keys : nullptr, next}, scores);
  float shrink[kHeads];
  for (int i = 0; i < kHeads; ++i) {
    shrink[i] = soften<Simd>(scores + i * kTileKeys, rows.count, largest + i, total + i);
  }
  constexpr int64_t kWide = kVectorsAtOnce * Simd::kLanes;
  RowsAhead<T> ahead{next ? values : nullptr, next};
  int64_t column = 0;
  for (; column + kWide <= d; column += kWide) {
    weigh<Simd, T, kHeads, kVectorsAtOnce>(scores, shrink, values + column, rows, kWide, padded, ahead, d,
                                           sums + column);
    ahead.first = nullptr;
  }
  for (; column < d; column += Simd::kLanes) {
    weigh<Simd, T, kHeads, 1>(scores, shrink, values + column, rows, d - column, padded, ahead, d, sums + column);
    ahead.first = nullptr;
  }
}

// `scratch`: as long as paged_attention.cpp's scratch_floats says.
template <typename Simd, typename T>
void attend(const PagedAttentionArgs& args, const KeySpan& span, const KeySpan* next_span, float* scratch,
            float* partials) {
  const int64_t d = args.head_size, shared = args.num_heads / args.num_kv_heads, heads = shared * span.num_kv_heads;
  const int64_t padded = (d + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes, tile = tile_keys<T>(args);
  float* const scores = scratch;
  float* const q = scores + kHeadsAtOnce * kTileKeys;
  float* const sums = q + heads * padded;
  float* const largest = sums + heads * padded;
  float* const total = largest + heads;
  std::memset(scratch, 0, (total + heads - scratch) * sizeof(float));
  for (int64_t i = 0; i < heads; ++i) {
    const T* row = static_cast<const T*>(args.q) + span.sequence * args.q_stride +
                   (span.kv_head * shared + i) * args.q_head_stride;
    for (int64_t k = 0; k < d; ++k) q[i * padded + k] = to_float(row[k]) * args.scale;
    largest[i] = -INFINITY;
  }
  TileRows rows(args, span, span.begin, tile);
  for (int64_t first = span.begin; first < span.end; first += tile) {
    const bool is_last = first + tile >= span.end;
    const TileRows next = is_last && next_span ? TileRows(args, *next_span, next_span->begin, tile)
                                               : TileRows(args, span, first + tile, tile);
    for (int64_t group = 0; group < span.num_kv_heads; ++group) {
      const int64_t kv_head = span.kv_head + group, end = (group + 1) * shared;
      const TileRows* ahead = &next;  // by the first heads of the group
      const auto attend_heads = [&](auto count, int64_t i) {
        attend_tile<Simd, T, decltype(count)::value>(args, kv_head, rows, ahead, q + i * padded, padded, scores,
                                                     largest + i, total + i, sums + i * padded);
        ahead = nullptr;
      };
      int64_t i = group * shared;
      for (; i + kHeadsAtOnce <= end; i += kHeadsAtOnce) {
        attend_heads(std::integral_constant<int, kHeadsAtOnce>(), i);
      }
      for (; i < end; ++i) attend_heads(std::integral_constant<int, 1>(), i);
    }
    rows = next;
  }
  for (int64_t i = 0; i < heads; ++i) {
    float* partial = partials + i * partial_stride(args);
    partial[0] = largest[i];
    partial[1] = total[i];
    std::memcpy(partial + 2, sums + i * padded, d * sizeof(float));
  }
}

template <typename Simd, typename T>
constexpr AttentionKernels kAttention = {Simd::kLanes, attend<Simd, T>};

template <typename Simd>
const AttentionKernels* attention_kernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return &kAttention<Simd, float>;
    case DType::kBFloat16: return &kAttention<Simd, BFloat16>;
    case DType::kFloat16: return &kAttention<Simd, Float16>;
    case DType::kFloat8E4M3:
    case DType::kFloat4E2M1: return nullptr;
  }
  return nullptr;
}

}  // namespace
}  // namespace moeopt
