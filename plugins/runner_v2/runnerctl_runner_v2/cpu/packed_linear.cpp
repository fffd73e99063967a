// y = x W^T + b on a weight stored in panels, fast at the few rows of a decode step.
//
// A panel holds kPanel output features as [in_features][kPanel], so that the kernel reads the
// weight front to back once per call (a step is bound by that) and keeps its sums in
// registers. Every sum is accumulated in float32, in the order of in_features, by one chain
// of fused multiply-adds, whatever else is computed beside it: a row's result depends neither
// on the number of rows nor on the number of threads.
//
// bfloat16 weights are widened in registers (two instructions for kPanel weights), which
// needs no bfloat16 instructions of the CPU. Within a panel they are stored in pairs
// (column c, column c + kLanes), the pair that one 32-bit lane holds.
//
// Where the CPU has AVX512-BF16, bfloat16 inputs are multiplied two features at a time, by
// its dot product of pairs. The panels are [in_features / 2][kPanel][2] then.

// Narrow includes: all of ATen.h takes three times as long to compile as this file.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // without AVX2 the compiler splits these vectors
#endif
constexpr int kPanel = 2 * kLanes;
constexpr int kMaxGroup = 4;        // panels taken together when one row alone is too few sums
constexpr int64_t kBlockRows = 96;  // their inputs stay in the second-level cache
constexpr int64_t kBlockDepth = 512;
constexpr int64_t kAhead = 64;         // in_features to read ahead of the sums
constexpr int64_t kMinWork = 1 << 16;  // multiply-adds that are worth a thread

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

// A kernel says how a panel is read: `Vector`, half of a panel's row; `kStep`, the features
// of a row; `add`, a row's part of a sum; and how many rows of x its sums leave room for.

template <typename Element_>
struct Widening {
  using Element = Element_;
  using Input = float;
  using Vector = Floats;
  static constexpr int kStep = 1;
  static constexpr int kTileRows = 6;  // 6 x 2 sums, 2 weights and 1 input fill 16 registers

  static void load(const float* row, Floats& low, Floats& high) {
    low = ::load(row);
    high = ::load(row + kLanes);
  }

  static void load(const uint16_t* row, Floats& low, Floats& high) {
    Words pairs;
    std::memcpy(&pairs, row, sizeof(pairs));
    low = (Floats)(pairs << 16);
    high = (Floats)(pairs & 0xffff0000u);
  }

  static void add(Floats& sum, Floats weights, float input) { sum += weights * input; }
};

#if defined(__AVX512BF16__)
constexpr bool kDots = true;

struct Dotting {
  using Element = uint16_t;
  using Input = uint32_t;  // two features
  using Vector = __m512bh;
  static constexpr int kStep = 2;
  static constexpr int kTileRows = 12;  // 12 x 2 sums of 32 registers

  static void load(const uint16_t* row, __m512bh& low, __m512bh& high) {
    low = (__m512bh)_mm512_loadu_si512(row);
    high = (__m512bh)_mm512_loadu_si512(row + kPanel);
  }

  static void add(Floats& sum, __m512bh weights, uint32_t input) {
    const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(input));
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, pair, weights);
  }
};
#else
constexpr bool kDots = false;
#endif

// sums[Rows][Group * kPanel] (+)= x[Rows][depth] * panels, `stride` elements between panels.
// `depth` and `x_stride` count inputs, of kStep features each.
template <typename Kernel, int Rows, int Group>
void tile(const typename Kernel::Input* x, int64_t x_stride,
          const typename Kernel::Element* panels, int64_t stride, int64_t depth, float* sums,
          int64_t sums_stride, bool resume) {
  Floats sum[Rows][Group][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g) {
      const float* at = sums + r * sums_stride + g * kPanel;
      sum[r][g][0] = resume ? load(at) : Floats{};
      sum[r][g][1] = resume ? load(at + kLanes) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g) {
      typename Kernel::Vector low, high;
      const auto* row = panels + g * stride + k * kPanel * Kernel::kStep;
      Kernel::load(row, low, high);
      // One or two rows wait for memory alone; more let the hardware's own reading ahead lapse.
      if (Rows > 2) __builtin_prefetch(row + kAhead * kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const auto input = x[r * x_stride + k];
        Kernel::add(sum[r][g][0], low, input);
        Kernel::add(sum[r][g][1], high, input);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g) {
      float* at = sums + r * sums_stride + g * kPanel;
      store(at, sum[r][g][0]);
      store(at + kLanes, sum[r][g][1]);
    }
  }
}

template <typename Kernel>
using Tile = void (*)(const typename Kernel::Input*, int64_t, const typename Kernel::Element*,
                      int64_t, int64_t, float*, int64_t, bool);

// Few rows take several panels at once: eight or more independent sums hide the latency.
int group_for(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

template <typename Kernel, int... Before>
Tile<Kernel> single_panel(int64_t rows, std::integer_sequence<int, Before...>) {
  static constexpr Tile<Kernel> kTiles[] = {tile<Kernel, Before + 1, 1>...};
  return kTiles[rows - 1];
}

template <typename Kernel>
Tile<Kernel> tile_for(int64_t rows, int group) {
  if (group == 4) return tile<Kernel, 1, 4>;
  if (group == 2) return rows == 2 ? tile<Kernel, 2, 2> : tile<Kernel, 3, 2>;
  return single_panel<Kernel>(rows, std::make_integer_sequence<int, Kernel::kTileRows>());
}

template <typename Input>
struct Problem {
  const Input* x;  // [rows, in_features / kStep]
  const float* bias;
  int64_t rows, in_features, out_features;
};

// Rows [row, row + rows) of `group` panels into sums[rows][group * kPanel].
template <typename Kernel>
void multiply(const Problem<typename Kernel::Input>& problem,
              const typename Kernel::Element* panels, int64_t row, int64_t rows, int group,
              float* sums) {
  constexpr int64_t kRow = kPanel * Kernel::kStep;
  const int64_t depth_total = problem.in_features / Kernel::kStep;
  const int64_t tiles = (rows + Kernel::kTileRows - 1) / Kernel::kTileRows;
  for (int64_t k = 0; k < depth_total || k == 0; k += kBlockDepth) {
    const int64_t depth = std::min(kBlockDepth, depth_total - k);
    int64_t done = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t next = rows * (t + 1) / tiles;  // even tiles: none has very few rows
      tile_for<Kernel>(next - done, group)(
          problem.x + (row + done) * depth_total + k, depth_total, panels + k * kRow,
          depth_total * kRow, depth, sums + done * group * kPanel, group * kPanel, k > 0);
      done = next;
    }
  }
}

template <typename Input, typename Output>
void finish(const Problem<Input>& problem, const float* sums, int64_t row, int64_t rows, int64_t column,
            int64_t width, Output* output) {
  const int64_t columns = std::min(width, problem.out_features - column);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * width;
    Output* to = output + (row + r) * problem.out_features + column;
    if (problem.bias != nullptr) {
      for (int64_t c = 0; c < columns; ++c) to[c] = Output(from[c] + problem.bias[column + c]);
    } else {
      for (int64_t c = 0; c < columns; ++c) to[c] = Output(from[c]);
    }
  }
}

template <typename Kernel, typename Output>
void run(const Problem<typename Kernel::Input>& problem, const typename Kernel::Element* packed,
         Output* output) {
  const int64_t panels = (problem.out_features + kPanel - 1) / kPanel;
  const int64_t blocks = (problem.rows + kBlockRows - 1) / kBlockRows;
  const int64_t block_rows = (problem.rows + blocks - 1) / blocks;
  const int wanted = group_for(problem.rows);
  const int64_t groups = (panels + wanted - 1) / wanted;
  const int64_t work = std::max<int64_t>(1, block_rows * problem.in_features * kPanel * wanted);
  const int64_t grain = std::max<int64_t>(1, kMinWork / work);
  at::parallel_for(0, blocks * groups, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kBlockRows * kPanel * kMaxGroup / 4];
    static_assert(kBlockRows / 4 >= 3);  // groups of several panels have three rows at most
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / groups * block_rows;
      const int64_t rows = std::min(block_rows, problem.rows - row);
      const int64_t first = item % groups * wanted;
      const int64_t last = std::min(panels, first + wanted);
      const int step = last - first < wanted ? 1 : wanted;
      for (int64_t panel = first; panel < last; panel += step) {
        const auto* at = packed + panel * problem.in_features * kPanel;
        multiply<Kernel>(problem, at, row, rows, step, sums);
        finish(problem, sums, row, rows, panel * kPanel, step * kPanel, output);
      }
    }
  });
}

template <typename Kernel>
void run_any_output(const Problem<typename Kernel::Input>& problem,
                    const typename Kernel::Element* packed, at::Tensor& output) {
  if (output.scalar_type() == at::kFloat) {
    run<Kernel>(problem, packed, output.data_ptr<float>());
  } else {
    run<Kernel>(problem, packed, output.data_ptr<at::BFloat16>());
  }
}

bool is_supported(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

// Whether bfloat16 weights of so many input features are stored for the dot product of pairs.
bool dots(int64_t in_features) { return kDots && in_features % 2 == 0; }

at::Tensor pack_linear_weight(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && is_supported(weight.scalar_type()),
              "pack_linear_weight takes a float32 or bfloat16 matrix, not ", weight.scalar_type(),
              " with ", weight.dim(), " dimensions");
  const int64_t out_features = weight.size(0), in_features = weight.size(1);
  const int64_t panels = (out_features + kPanel - 1) / kPanel;
  const auto source = weight.contiguous();
  auto packed = at::empty({panels, in_features, kPanel}, weight.options());
  const bool paired = weight.scalar_type() == at::kBFloat16;
  const bool dotted = paired && dots(in_features);
  const auto copy = [&](auto zero) {
    using Element = decltype(zero);
    const auto* from = static_cast<const Element*>(source.const_data_ptr());
    auto* to = static_cast<Element*>(packed.mutable_data_ptr());
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        for (int64_t k = 0; k < in_features; ++k) {
          for (int64_t c = 0; c < kPanel; ++c) {
            const int64_t column = paired && !dotted ? c / 2 + c % 2 * kLanes : c;
            const int64_t feature = panel * kPanel + column;
            const int64_t at = dotted ? k / 2 * 2 * kPanel + 2 * c + k % 2 : k * kPanel + c;
            to[panel * in_features * kPanel + at] =
                feature < out_features ? from[feature * in_features + k] : zero;
          }
        }
      }
    });
  };
  paired ? copy(uint16_t{0}) : copy(0.0f);
  return packed;
}

// [rows, in_features] in float32, front to back.
at::Tensor widen(const at::Tensor& x) {
  const auto source = x.contiguous();
  if (source.scalar_type() == at::kFloat) return source;
  auto wide = at::empty(source.sizes(), source.options().dtype(at::kFloat));
  const auto* from = source.const_data_ptr<at::BFloat16>();
  auto* to = wide.mutable_data_ptr<float>();
  at::parallel_for(0, source.numel(), kMinWork, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(from[i]);
  });
  return wide;
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features) {
  TORCH_CHECK(is_supported(x.scalar_type()) && is_supported(packed.scalar_type()),
              "packed_linear takes float32 or bfloat16, not ", x.scalar_type(), " times ",
              packed.scalar_type());
  TORCH_CHECK(x.dim() >= 1 && packed.dim() == 3 && packed.is_contiguous() &&
                  packed.size(2) == kPanel && x.size(-1) == packed.size(1),
              "packed_linear: x ", x.sizes(), " does not fit the packed weight ", packed.sizes());
  TORCH_CHECK(out_features <= packed.size(0) * kPanel &&
                  out_features > (packed.size(0) - 1) * kPanel,
              "packed_linear: out_features ", out_features, " does not fit the packed weight ",
              packed.sizes());
  TORCH_CHECK(!bias || (bias->numel() == out_features && is_supported(bias->scalar_type())),
              "packed_linear: bias of the wrong size or type");
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  auto output = at::empty(shape, x.options());
  if (output.numel() == 0) return output;
  const auto offsets = bias ? widen(*bias) : at::Tensor();
  const float* offset = bias ? offsets.const_data_ptr<float>() : nullptr;
  const int64_t rows = output.numel() / out_features, in_features = packed.size(1);
#if defined(__AVX512BF16__)
  if (packed.scalar_type() == at::kBFloat16 && dots(in_features)) {
    const auto pairs = x.to(at::kBFloat16).contiguous();
    const Problem<uint32_t> problem{static_cast<const uint32_t*>(pairs.const_data_ptr()), offset,
                                    rows, in_features, out_features};
    run_any_output<Dotting>(problem, static_cast<const uint16_t*>(packed.const_data_ptr()), output);
    return output;
  }
#endif
  const auto inputs = widen(x);
  const Problem<float> problem{inputs.const_data_ptr<float>(), offset, rows, in_features,
                               out_features};
  if (packed.scalar_type() == at::kFloat) {
    run_any_output<Widening<float>>(problem, packed.const_data_ptr<float>(), output);
  } else {
    run_any_output<Widening<uint16_t>>(
        problem, static_cast<const uint16_t*>(packed.const_data_ptr()), output);
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(runnerctl_cpu, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def("pack_linear_weight(Tensor weight) -> Tensor", tags);
  library.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
              tags);
  library.def("dots_bfloat16(int in_features) -> bool", tags);
}

TORCH_LIBRARY_IMPL(runnerctl_cpu, CPU, library) {
  library.impl("pack_linear_weight", pack_linear_weight);
  library.impl("packed_linear", packed_linear);
}

TORCH_LIBRARY_IMPL(runnerctl_cpu, CompositeImplicitAutograd, library) {
  library.impl("dots_bfloat16", dots);
}
