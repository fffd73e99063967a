// Attention of single query tokens over the paged cache, read where it lies.
//
// One work item is a query token and up to kMaxHeads of the query heads that share a KV
// head: keys and values are read once for all of them. Scores are float32; the softmax takes
// two passes over a buffer of scores, which is small next to the keys. Nothing beyond a
// sequence's length is read.
//
// Also the copy of a step's keys and values to their slots.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#if defined(__SSE3__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // without AVX2 the compiler splits these vectors
#endif
constexpr int kMaxHeads = 4;
constexpr int kPositions = 4;  // keys that are multiplied at a time
constexpr int kTile = 4;  // vectors of a value that are summed in registers at a time

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// bfloat16 is the upper half of a float32.
inline Floats load(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline float widen(float value) { return value; }

inline float widen(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline float sum_lanes(Floats value) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
}

// The sums of four vectors, into to[4]; shuffles take a third of the time of adding lanes.
inline void sum_lanes_of_four(const Floats* values, float* to) {
#if defined(__SSE3__)
  __m128 quarter[4];
  for (int i = 0; i < 4; ++i) {
    float lanes[kLanes];
    store(lanes, values[i]);
    quarter[i] = _mm_loadu_ps(lanes);
    for (int lane = 4; lane < kLanes; lane += 4) {
      quarter[i] = _mm_add_ps(quarter[i], _mm_loadu_ps(lanes + lane));
    }
  }
  const __m128 low = _mm_hadd_ps(quarter[0], quarter[1]);
  const __m128 high = _mm_hadd_ps(quarter[2], quarter[3]);
  _mm_storeu_ps(to, _mm_hadd_ps(low, high));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum_lanes(values[i]);
#endif
}

// e^x for x <= 0, to about two units in the last place: 2^n times a polynomial in the rest
// (the coefficients are those of Cephes' expf). Below -87 it is 0.
inline Floats exponential(Floats x) {
  const Floats magic = Floats{} + 12582912.0f;  // adding it rounds to a whole number
  const Floats clamped = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats n = (clamped * 1.44269504088896341f + magic) - magic;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * (Floats)exponent;
  return x < -87.0f ? Floats{} : result;
}

template <typename Element>
struct Problem {
  const Element* query;  // [tokens, heads, head_size]
  const Element* key;    // [blocks, block_size, kv_heads, head_size]
  const Element* value;  // [blocks, block_size, kv_heads, head_size_v]
  Element* output;       // [tokens, heads, head_size_v]
  const int64_t* rows;   // [requests]
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t heads, kv_heads, head_size, head_size_v, block_size, table_width;
  float scale, softcap;
  int64_t window;
};

struct Scratch {
  std::vector<float> query, scores, sums;
};

// The hardware reads ahead only along a head's row, which is short, and never into another block.
template <typename Element>
inline void read_ahead(const Element* row, int64_t size) {
  for (int64_t d = 0; d < size; d += int64_t(64 / sizeof(Element))) __builtin_prefetch(row + d);
}

// The dot products of Heads queries with Positions keys, into scores[heads][stride].
template <typename Element, int Heads, int Positions>
inline void multiply(const float* query, const Element* keys, int64_t key_stride,
                     int64_t head_size, float* scores, int64_t stride) {
  static_assert(Positions == 1 || Positions == kPositions);
  const int64_t whole = head_size / kLanes * kLanes;
  Floats sum[Heads][Positions] = {};
  for (int64_t d = 0; d < whole; d += kLanes) {
    Floats part[Positions];
#pragma GCC unroll 4
    for (int i = 0; i < Positions; ++i) part[i] = load(keys + i * key_stride + d);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const Floats q = load(query + h * head_size + d);
#pragma GCC unroll 4
      for (int i = 0; i < Positions; ++i) sum[h][i] += part[i] * q;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
    float* to = scores + h * stride;
    if constexpr (Positions == 1) {
      to[0] = sum_lanes(sum[h][0]);
    } else {
      sum_lanes_of_four(sum[h], to);
    }
    for (int64_t d = whole; d < head_size; ++d) {
      for (int i = 0; i < Positions; ++i) {
        to[i] += widen(keys[i * key_stride + d]) * query[h * head_size + d];
      }
    }
  }
}

// scores[heads][padded] of positions first .. length; query is float32 and scaled.
template <typename Element, int Heads>
void score(const Problem<Element>& p, const int32_t* table, int64_t kv_head, const float* query,
           int64_t first, int64_t length, float* scores, int64_t padded) {
  constexpr int kAtOnce = Heads == 4 ? 2 : Heads;  // times kPositions sums must fit registers
  const int64_t stride = p.kv_heads * p.head_size, value_stride = p.kv_heads * p.head_size_v;
  for (int64_t start = first; start < length;) {
    const int64_t end = std::min(length, (start / p.block_size + 1) * p.block_size);
    const int64_t slot = table[start / p.block_size] * p.block_size + start % p.block_size;
    const Element* key = p.key + slot * stride + kv_head * p.head_size;
    const bool is_last = end == length;  // then the values come next
    const Element* next =
        is_last ? p.value + table[first / p.block_size] * p.block_size * value_stride +
                      kv_head * p.head_size_v
                : p.key + table[end / p.block_size] * p.block_size * stride + kv_head * p.head_size;
    while (start < end) {
      const bool several = end - start >= kPositions;
      for (int i = 0; i < (several ? kPositions : 1); ++i) {
        read_ahead(next, is_last ? p.head_size_v : p.head_size);
        next += is_last ? value_stride : stride;
      }
      for (int h = 0; h < Heads; h += kAtOnce) {
        const float* from = query + h * p.head_size;
        float* to = scores + h * padded + start - first;
        if (several) {
          multiply<Element, kAtOnce, kPositions>(from, key, stride, p.head_size, to, padded);
        } else {
          multiply<Element, kAtOnce, 1>(from, key, stride, p.head_size, to, padded);
        }
      }
      start += several ? kPositions : 1;
      key += (several ? kPositions : 1) * stride;
    }
  }
}

// Turns scores into e^(score - highest); returns one over their sum.
float normalise(float* scores, int64_t count, int64_t padded, float softcap) {
  if (softcap > 0) {
    for (int64_t i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
  }
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = count; i < padded; ++i) scores[i] = kLowest;
  Floats high = Floats{} + kLowest;
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats part = load(scores + i);
    high = part > high ? part : high;
  }
  float highest = kLowest;
  for (int i = 0; i < kLanes; ++i) highest = std::max(highest, high[i]);
  Floats sum = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats weight = exponential(load(scores + i) - highest);
    store(scores + i, weight);
    sum += weight;
  }
  return 1.0f / sum_lanes(sum);
}

// sums[heads][head_size_v] = weights[heads][...] times the values, a tile of columns at a time.
template <typename Element, int Heads>
void weigh(const Problem<Element>& p, const int32_t* table, int64_t kv_head,
           const float* weights, int64_t padded, int64_t first, int64_t length, float* sums) {
  const int64_t stride = p.kv_heads * p.head_size_v;
  std::fill(sums, sums + Heads * p.head_size_v, 0.0f);
  // Block by block, so that a block's values are in the nearest cache for all their tiles.
  for (int64_t start = first; start < length;) {
    const int64_t end = std::min(length, (start / p.block_size + 1) * p.block_size);
    const int64_t slot = table[start / p.block_size] * p.block_size + start % p.block_size;
    const Element* values = p.value + slot * stride + kv_head * p.head_size_v;
    if (end < length) {
      const Element* next =
          p.value + table[end / p.block_size] * p.block_size * stride + kv_head * p.head_size_v;
      for (int64_t i = 0; i < end - start; ++i) read_ahead(next + i * stride, p.head_size_v);
    }
    int64_t column = 0;
    for (; column + kTile * kLanes <= p.head_size_v; column += kTile * kLanes) {
      Floats sum[Heads][kTile];
      for (int h = 0; h < Heads; ++h)
        for (int t = 0; t < kTile; ++t)
          sum[h][t] = load(sums + h * p.head_size_v + column + t * kLanes);
      for (int64_t i = 0; i < end - start; ++i) {
        const Element* value = values + i * stride + column;
#pragma GCC unroll 4
        for (int t = 0; t < kTile; ++t) {
          const Floats part = load(value + t * kLanes);
#pragma GCC unroll 4
          for (int h = 0; h < Heads; ++h)
            sum[h][t] += part * weights[h * padded + start - first + i];
        }
      }
      for (int h = 0; h < Heads; ++h)
        for (int t = 0; t < kTile; ++t)
          store(sums + h * p.head_size_v + column + t * kLanes, sum[h][t]);
    }
    for (; column < p.head_size_v; ++column) {
      for (int h = 0; h < Heads; ++h) {
        float sum = sums[h * p.head_size_v + column];
        for (int64_t i = 0; i < end - start; ++i)
          sum += widen(values[i * stride + column]) * weights[h * padded + start - first + i];
        sums[h * p.head_size_v + column] = sum;
      }
    }
    start = end;
  }
}

inline void put(float* to, float value) { *to = value; }

inline void put(uint16_t* to, float value) {
  const c10::BFloat16 rounded(value);
  *to = rounded.x;
}

template <typename Element, int Heads>
void attend(const Problem<Element>& p, int64_t request, int64_t kv_head, int64_t first_head,
            Scratch& scratch) {
  const int64_t length = p.seq_lens[request];
  const int64_t first = p.window > 0 ? std::max<int64_t>(0, length - p.window) : 0;
  const int64_t count = length - first;
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  const int32_t* table = p.block_table + request * p.table_width;
  const int64_t at = p.rows[request] * p.heads + first_head;
  scratch.query.resize(Heads * p.head_size);
  scratch.scores.resize(Heads * padded);
  scratch.sums.resize(Heads * p.head_size_v);
  float* query = scratch.query.data();
  for (int64_t i = 0; i < Heads * p.head_size; ++i) {
    query[i] = widen(p.query[at * p.head_size + i]) * p.scale;
  }
  float* scores = scratch.scores.data();
  score<Element, Heads>(p, table, kv_head, query, first, length, scores, padded);
  float inverse[Heads];
  for (int h = 0; h < Heads; ++h) {
    inverse[h] = normalise(scores + h * padded, count, padded, p.softcap);
  }
  weigh<Element, Heads>(p, table, kv_head, scores, padded, first, length, scratch.sums.data());
  for (int h = 0; h < Heads; ++h) {
    for (int64_t d = 0; d < p.head_size_v; ++d) {
      put(p.output + (at + h) * p.head_size_v + d, scratch.sums[h * p.head_size_v + d] * inverse[h]);
    }
  }
}

template <typename Element>
void run(const Problem<Element>& p, int64_t requests) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t parts = (group + kMaxHeads - 1) / kMaxHeads;
  at::parallel_for(0, requests * p.kv_heads * parts, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % parts, kv_head = item / parts % p.kv_heads;
      const int64_t request = item / parts / p.kv_heads;
      const int64_t first_head = kv_head * group + part * kMaxHeads;
      switch (std::min<int64_t>(kMaxHeads, group - part * kMaxHeads)) {
        case 1: attend<Element, 1>(p, request, kv_head, first_head, scratch); break;
        case 2: attend<Element, 2>(p, request, kv_head, first_head, scratch); break;
        case 3: attend<Element, 3>(p, request, kv_head, first_head, scratch); break;
        default: attend<Element, 4>(p, request, kv_head, first_head, scratch);
      }
    }
  });
}

template <typename Element>
void copy_rows(const at::Tensor& from, at::Tensor& pages, const int64_t* slots) {
  const int64_t heads = from.size(1), size = from.size(2);
  const int64_t row_stride = from.stride(0), head_stride = from.stride(1);
  const auto* source = static_cast<const Element*>(from.const_data_ptr());
  auto* target = static_cast<Element*>(pages.mutable_data_ptr());
  at::parallel_for(0, from.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        std::memcpy(target + (slots[token] * heads + head) * size,
                    source + token * row_stride + head * head_stride, size * sizeof(Element));
      }
    }
  });
}

void check(bool holds, const char* what) { TORCH_CHECK(holds, "paged_decode: ", what); }

void paged_decode(at::Tensor& output, const at::Tensor& query, const at::Tensor& key_cache,
                  const at::Tensor& value_cache, const at::Tensor& rows,
                  const at::Tensor& seq_lens, const at::Tensor& block_table, double scale,
                  int64_t window, double softcap) {
  const auto type = query.scalar_type();
  check(type == at::kFloat || type == at::kBFloat16, "float32 or bfloat16 only");
  check(key_cache.scalar_type() == type && value_cache.scalar_type() == type &&
            output.scalar_type() == type,
        "query, caches and output must be of one type");
  check(query.is_contiguous() && output.is_contiguous() && key_cache.is_contiguous() &&
            value_cache.is_contiguous() && rows.is_contiguous() && seq_lens.is_contiguous() &&
            block_table.is_contiguous(),
        "tensors must be contiguous");
  check(query.dim() == 3 && output.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4,
        "query and output have 3 dimensions, caches 4");
  check(query.size(1) % key_cache.size(2) == 0 && query.size(2) == key_cache.size(3) &&
            output.size(1) == query.size(1) && output.size(2) == value_cache.size(3) &&
            value_cache.size(1) == key_cache.size(1) && value_cache.size(2) == key_cache.size(2),
        "heads or head sizes do not fit");
  check(rows.scalar_type() == at::kLong && seq_lens.scalar_type() == at::kInt &&
            block_table.scalar_type() == at::kInt,
        "rows are int64, lengths and block table int32");
  check(seq_lens.numel() == rows.numel() && block_table.size(0) == rows.numel(),
        "rows, lengths and block table must be of the same requests");
  const auto fill = [&](auto problem) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(problem.query)>>;
    problem.query = static_cast<const Element*>(query.const_data_ptr());
    problem.key = static_cast<const Element*>(key_cache.const_data_ptr());
    problem.value = static_cast<const Element*>(value_cache.const_data_ptr());
    problem.output = static_cast<Element*>(output.mutable_data_ptr());
    problem.rows = rows.const_data_ptr<int64_t>();
    problem.seq_lens = seq_lens.const_data_ptr<int32_t>();
    problem.block_table = block_table.const_data_ptr<int32_t>();
    problem.heads = query.size(1), problem.kv_heads = key_cache.size(2);
    problem.head_size = query.size(2), problem.head_size_v = value_cache.size(3);
    problem.block_size = key_cache.size(1), problem.table_width = block_table.size(1);
    problem.scale = float(scale), problem.softcap = float(softcap), problem.window = window;
    run(problem, rows.numel());
  };
  if (type == at::kFloat) {
    fill(Problem<float>{});
  } else {
    fill(Problem<uint16_t>{});
  }
}

void write_slots(const at::Tensor& rows, at::Tensor& pages, const at::Tensor& slots) {
  TORCH_CHECK(rows.dim() == 3 && pages.dim() == 4 && pages.is_contiguous() &&
                  rows.scalar_type() == pages.scalar_type() && rows.size(1) == pages.size(2) &&
                  rows.size(2) == pages.size(3) && rows.stride(2) == 1,
              "write_slots: rows ", rows.sizes(), " do not fit pages ", pages.sizes());
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() &&
                  slots.numel() == rows.size(0),
              "write_slots: one int64 slot per row");
  const int64_t* at = slots.const_data_ptr<int64_t>();
  if (rows.element_size() == 4) {
    copy_rows<uint32_t>(rows, pages, at);
  } else {
    TORCH_CHECK(rows.element_size() == 2, "write_slots: float32 or bfloat16 only");
    copy_rows<uint16_t>(rows, pages, at);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(runnerctl_cpu, library) {
  library.def(
      "paged_decode(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor rows, Tensor seq_lens, Tensor block_table, float scale, int window, "
      "float softcap) -> ()");
  library.def("write_slots(Tensor rows, Tensor(a!) pages, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(runnerctl_cpu, CPU, library) {
  library.impl("paged_decode", paged_decode);
  library.impl("write_slots", write_slots);
}
