// Vectors of floats, panels of columns, and products of rows with a panel, shared by the kernels.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

// The number of floats per vector, and of rows with two vectors each whose sums fit into the registers.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 14;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6;
#else
constexpr int WIDTH = 4, ROWS = 6;
#endif
constexpr int PANEL = 2 * WIDTH;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define INLINED inline __attribute__((always_inline))
// The compiler keeps sums in registers only if the loops over them are unrolled.
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

INLINED Vector load(const float* from) { return *(const Anywhere*)from; }
INLINED void store(float* to, Vector x) { *(Anywhere*)to = x; }
INLINED Vector all(float x) { return x - Vector{}; }
INLINED Vector larger(Vector a, Vector b) { return a > b ? a : b; }

int up(int count, int step) { return (count + step - 1) / step * step; }

// 2^x for x <= 0, up to two roundings: a power of two from its bits, times a polynomial on [-1/2, 1/2]. Propagates NaN.
INLINED Vector power_of_two(Vector x) {
  x = x < -126.f ? all(-126.f) : x;
  const float rounding = 12582912.f + 127.f;  // 1.5 * 2^23 puts the integer into the last bits, 127 is the exponent's
  Vector shifted = x + rounding, rest = x - (shifted - rounding);
  Vector sum = rest * 1.535336188319500e-4f + 1.339887440266574e-3f;
  sum = sum * rest + 9.618437357674640e-3f;
  sum = sum * rest + 5.550332471162809e-2f;
  sum = sum * rest + 2.402264791363012e-1f;
  sum = sum * rest + 6.931472028550421e-1f;
  sum = sum * rest + 1.f;
  return sum * (Vector)((Integers)shifted << 23);
}

// Rows of a WIDTH x WIDTH block are exchanged with columns in log2(WIDTH) steps of pairs that lie STEP stride.
template <int STEP, int... LANE>
INLINED void exchange(Vector* x, std::integer_sequence<int, LANE...>) {
  for (int i = 0; i < WIDTH; i++) {
    if (i & STEP) continue;
    Vector a = x[i], b = x[i + STEP];
#if defined(__clang__)
    x[i] = __builtin_shufflevector(a, b, (LANE & STEP ? WIDTH + LANE - STEP : LANE)...);
    x[i + STEP] = __builtin_shufflevector(a, b, (LANE & STEP ? WIDTH + LANE : LANE + STEP)...);
#else
    x[i] = __builtin_shuffle(a, b, Integers{(LANE & STEP ? WIDTH + LANE - STEP : LANE)...});
    x[i + STEP] = __builtin_shuffle(a, b, Integers{(LANE & STEP ? WIDTH + LANE : LANE + STEP)...});
#endif
  }
}

INLINED void transpose(Vector* x) {
  constexpr auto lanes = std::make_integer_sequence<int, WIDTH>{};
  exchange<1>(x, lanes);
  exchange<2>(x, lanes);
  if constexpr (WIDTH > 4) exchange<4>(x, lanes);
  if constexpr (WIDTH > 8) exchange<8>(x, lanes);
}

// Buffers of one thread, reused between calls.
struct Workspace {
  float* floats = nullptr;
  size_t size = 0;
  ~Workspace() { free(floats); }
  float* of(size_t wanted) {
    if (wanted > size) {
      free(floats);
      size = (wanted + 15) / 16 * 16;
      floats = (float*)aligned_alloc(64, size * sizeof(float));
      if (!floats) size = 0;
    }
    return floats;
  }
};
thread_local Workspace workspace;

// Packs keys times `factor` into panels of two vectors, or one in the last panel if enough: [rank][keys of the panel].
void pack_keys(const float* key, int64_t token, int keys, int rank, float factor, float* packed) {
  const int padded = up(keys, WIDTH);
  for (int first = 0; first < padded; first += WIDTH) {
    const int panel = first / PANEL * PANEL, wide = padded - panel < PANEL ? WIDTH : PANEL;
    float* to = packed + (int64_t)panel * rank + (first - panel);
    for (int start = 0; start < rank; start += WIDTH) {
      const int own = rank - start < WIDTH ? rank - start : WIDTH;
      Vector block[WIDTH];
      for (int i = 0; i < WIDTH; i++) {
        const float* row = key + (first + i) * token + start;
        block[i] = Vector{};
        if (first + i >= keys) continue;
        if (own == WIDTH) block[i] = load(row);
        else memcpy(&block[i], row, own * sizeof(float));
        block[i] *= factor;
      }
      transpose(block);
      for (int i = 0; i < own; i++) store(to + (int64_t)(start + i) * wide, block[i]);
    }
  }
}

// N rows times VECTORS vectors of columns, summed over `length`. Sums stay in registers. The numbers of a row lie
// `step` apart.
template <int N, int VECTORS>
INLINED void multiply(const float* rows, int64_t stride, const float* columns, int length, Vector (&sums)[N][VECTORS],
                      int step = 1) {
  // An address is a pointer plus up to two strides. With one pointer per row, the registers would not be enough.
  constexpr int SHARED = 3, POINTERS = (N + SHARED - 1) / SHARED;
  const float* pointers[POINTERS];
  UNROLLED for (int p = 0; p < POINTERS; p++) pointers[p] = rows + SHARED * p * stride;
  for (int i = 0; i < length; i++, columns += VECTORS * WIDTH) {
    Vector column[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) column[v] = load(columns + v * WIDTH);
    UNROLLED for (int n = 0; n < N; n++)
      UNROLLED for (int v = 0; v < VECTORS; v++)
        sums[n][v] += pointers[n / SHARED][n % SHARED * stride] * column[v];
    UNROLLED for (int p = 0; p < POINTERS; p++) pointers[p] += step;
  }
}

}  // namespace
