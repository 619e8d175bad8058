// Features of tokens in columns: tokens are the lanes of the vectors.
//
// A tile of outputs of a linear map is then a few rows of its weight, as PyTorch stores it, times columns. No weight is
// packed or copied, so a changed weight is used at once. The sums are the columns that the next map reads. Only the
// first features are transposed, and the last ones are transposed back. What a token needs of itself, such as the mean
// of a norm, is computed lane by lane.
#pragma once
#include <algorithm>

#include "vectors.hpp"

namespace {

// One map, passed from Python: addresses of the weight [outputs, inputs] and of the bias (zero: none).
struct Map {
  int64_t weight, bias, inputs, outputs, gelu;
};

// The number of tokens whose features between two maps fit into the L2 cache.
constexpr int BLOCK = 128;

// [features][tokens] as `pack_keys` writes it, in panels of two vectors of tokens. The last panel may have only one.
struct Columns {
  float* data;
  int features, tokens;

  int panels() const { return (tokens + PANEL - 1) / PANEL; }
  int wide(int panel) const { return tokens - panel * PANEL > WIDTH ? PANEL : WIDTH; }
  float* panel(int number) const { return data + (int64_t)number * PANEL * features; }
  // The panels from `first` to `last`.
  Columns part(int first, int last) const {
    return {panel(first), features, std::min(tokens, last * PANEL) - first * PANEL};
  }
};

// Writes the columns of the first `tokens` tokens as rows.
void leave(const Columns& from, int tokens, float* rows, int64_t stride) {
  for (int token = 0; token < tokens; token += WIDTH) {
    const int panel = token / PANEL, wide = from.wide(panel), count = std::min(WIDTH, tokens - token);
    const float* column = from.panel(panel) + token % PANEL;
    for (int start = 0; start < from.features; start += WIDTH) {
      const int own = std::min(WIDTH, from.features - start);
      Vector block[WIDTH];
      for (int i = 0; i < WIDTH; i++) block[i] = i < own ? load(column + (int64_t)(start + i) * wide) : Vector{};
      transpose(block);
      float* to = rows + (int64_t)token * stride + start;
      for (int i = 0; i < count; i++, to += stride) {
        if (own == WIDTH) store(to, block[i]);
        else memcpy(to, &block[i], own * sizeof(float));
      }
    }
  }
}

// x (1 + erf(x / sqrt(2))) / 2, with erf by formula 7.1.26 of Abramowitz and Stegun (1964): absolute error below 1.5e-7
// times |x|, as in PyTorch's vector code.
INLINED Vector gelu(Vector x) {
  Vector z = x * 0.70710678118654752f, size = z < 0.f ? -z : z, t = 1.f / (1.f + 0.3275911f * size);
  Vector sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  // 1 - erf(|z|), with a power of at least 2^-100: arithmetic with numbers below 2^-126 takes a hundred times as long.
  Vector tail = sum * t * power_of_two(larger(z * z * -1.4426950408889634f, all(-100.f)));
  return 0.5f * x * (z < 0.f ? tail : 2.f - tail);
}

// How the outputs of a map are stored. ADDED adds them to the stored values, each output times its `scale` (null: 1).
enum Use { STORED, GELU, ADDED };

struct Tile {
  const float *weight, *bias, *scale, *columns;
  int64_t stride;
  int depth;
  Use use;
  float* to;
};

template <int N, int VECTORS>
void compute_tile(const Tile& tile) {
  constexpr int wide = VECTORS * WIDTH;
  Vector sums[N][VECTORS];
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) sums[n][v] = all(tile.bias ? tile.bias[n] : 0.f);
  multiply(tile.weight, tile.stride, tile.columns, tile.depth, sums);
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      float* to = tile.to + n * wide + v * WIDTH;
      if (tile.use == GELU) sums[n][v] = gelu(sums[n][v]);
      if (tile.use == ADDED) sums[n][v] = load(to) + sums[n][v] * (tile.scale ? tile.scale[n] : 1.f);
      store(to, sums[n][v]);
    }
}

typedef void (*Compute)(const Tile&);

template <int VECTORS, int... N>
Compute computing(int rows, std::integer_sequence<int, N...>) {
  static constexpr Compute known[] = {compute_tile<N + 1, VECTORS>...};
  return known[rows - 1];
}

// Calls `compute(first, count)` for tiles of nearly equal numbers of rows, because a last tile of a single row would
// take as long as one of four.
template <typename Function>
INLINED void in_tiles(int rows, Function compute) {
  const int tiles = (rows + ROWS - 1) / ROWS;
  for (int tile = 0; tile < tiles; tile++) {
    const int first = (int)((int64_t)rows * tile / tiles);
    compute(first, (int)((int64_t)rows * (tile + 1) / tiles) - first);
  }
}

// Computes the map of all columns and writes it to the features of `to` from `first` on.
void multiply_by(const Map& map, const Columns& from, const Columns& to, int first, Use use,
                 const float* scale = nullptr) {
  constexpr auto all_rows = std::make_integer_sequence<int, ROWS>{};
  constexpr int PAGE = 1024;  // rows whose stride is a multiple of a page would all be in one set of the L1 cache
  static thread_local Workspace copies;
  const int inputs = (int)map.inputs;
  const bool copied = inputs && inputs % PAGE == 0;
  float* copy = copied ? copies.of((size_t)ROWS * (inputs + WIDTH)) : nullptr;
  in_tiles((int)map.outputs, [&](int start, int count) {
    const float *weight = (const float*)map.weight + (int64_t)start * inputs, *bias = (const float*)map.bias;
    for (int row = 0; copy && row < count; row++)
      memcpy(copy + row * (inputs + WIDTH), weight + (int64_t)row * inputs, inputs * sizeof(float));
    // The next rows are loaded from memory while these are multiplied, with 16 numbers per cache line.
    const int64_t lines = (int64_t)std::min(ROWS, (int)map.outputs - start - count) * inputs / 16, panels = from.panels();
    const float* next = (const float*)map.weight + (int64_t)(start + count) * inputs;
    for (int panel = 0; panel < panels; panel++) {
      for (int64_t line = lines * panel / panels; line < lines * (panel + 1) / panels; line++)
        __builtin_prefetch(next + line * 16, 0, 2);
      const int wide = from.wide(panel);
      const Compute run = wide == PANEL ? computing<2>(count, all_rows) : computing<1>(count, all_rows);
      run({copy ? copy : weight, bias ? bias + start : nullptr, scale ? scale + start : nullptr, from.panel(panel),
           copy ? inputs + WIDTH : inputs, inputs, use, to.panel(panel) + (int64_t)(first + start) * wide});
    }
  });
}

// Several maps, one after the other. `use` applies to the last one. `between` is a buffer of two times `most` features.
void apply(const Map* maps, int number, const Columns& from, const Columns& to, Use use, const float* scale,
           float* between, int64_t most) {
  Columns features = from;
  for (int i = 0; i < number; i++) {
    const bool last = i + 1 == number;
    const int64_t place = i % 2 * most * up(from.tokens, WIDTH);
    const Columns next = last ? to : Columns{between + place, (int)maps[i].outputs, from.tokens};
    multiply_by(maps[i], features, next, 0, last && use == ADDED ? ADDED : maps[i].gelu ? GELU : STORED, scale);
    features = next;
  }
}

}  // namespace
