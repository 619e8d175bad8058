// Linear maps of few tokens on a CPU, one after the other, with GELU between them if wanted.
//
// Weights are packed once into panels of two vectors of outputs. A tile of rows is multiplied with a panel while its
// sums are in registers; bias and GELU are applied before the sums are stored. A block of rows passes through all maps
// while its features are in the L2 cache.
#include <algorithm>
#include <new>

#include "vectors.hpp"

namespace {

// One map, passed from Python: addresses of the packed weight and of the bias (zero: none), padded to whole vectors.
struct Map {
  int64_t weight, bias, inputs, outputs, gelu;
};

// Inputs of a panel that are multiplied at once, rows whose features between two maps fit the L2 cache, and rows of a
// single map.
constexpr int DEPTH = 768, BLOCK = 96, SINGLE = 196;

// x (1 + erf(x / sqrt(2))) / 2, with erf by formula 7.1.26 of Abramowitz and Stegun (1964): absolute error below 1.5e-7
// times |x|, as in PyTorch's vector code.
INLINED Vector gelu(Vector x) {
  Vector z = x * 0.70710678118654752f, size = z < 0.f ? -z : z, t = 1.f / (1.f + 0.3275911f * size);
  Vector sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  Vector tail = sum * t * power_of_two(z * z * -1.4426950408889634f);  // 1 - erf(|z|)
  return 0.5f * x * (z < 0.f ? tail : 2.f - tail);
}

struct Tile {
  const float *rows, *panel, *bias;  // without `bias` the sums continue those in `output`
  int depth, features;  // features: those of the panel that exist
  float* output;
  int64_t output_stride;
  bool gelu;
};

template <int N, int VECTORS>
INLINED void compute(const Tile& tile) {
  constexpr int wide = VECTORS * WIDTH;
  const bool whole = tile.features == wide;
  float edge[N * wide];  // a panel with fewer features than lanes is computed beside the output
  float* to = whole ? tile.output : edge;
  const int64_t stride = whole ? tile.output_stride : wide;
  if (!whole && !tile.bias)
    for (int n = 0; n < N; n++) {
      memset(edge + n * wide, 0, wide * sizeof(float));
      memcpy(edge + n * wide, tile.output + n * tile.output_stride, tile.features * sizeof(float));
    }
  Vector sums[N][VECTORS];
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++)
      sums[n][v] = load(tile.bias ? tile.bias + v * WIDTH : to + n * stride + v * WIDTH);
  multiply(tile.rows, DEPTH, tile.panel, tile.depth, sums);
  if (tile.gelu)
    UNROLLED for (int n = 0; n < N; n++)
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[n][v] = gelu(sums[n][v]);
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(to + n * stride + v * WIDTH, sums[n][v]);
  if (!whole)
    for (int n = 0; n < N; n++)
      memcpy(tile.output + n * tile.output_stride, edge + n * wide, tile.features * sizeof(float));
}

template <int N, int VECTORS>
void compute_tile(const Tile& tile) {
  compute<N, VECTORS>(tile);
}

typedef void (*Compute)(const Tile&);

template <int VECTORS, int... N>
Compute computing(int rows, std::integer_sequence<int, N...>) {
  static constexpr Compute known[] = {compute_tile<N + 1, VECTORS>...};
  return known[rows - 1];
}

const float zeros[PANEL] = {};

// output [count, outputs] = the map of `count` rows; `packed` is a buffer of count * DEPTH floats.
void apply(const Map& map, const float* rows, int64_t stride, int count, float* output, int64_t output_stride,
           float* packed) {
  constexpr auto all_rows = std::make_integer_sequence<int, ROWS>{};
  const float *weight = (const float*)map.weight, *bias = (const float*)map.bias;
  const int inputs = (int)map.inputs, outputs = (int)map.outputs, tiles = (count + ROWS - 1) / ROWS;
  for (int start = 0; start == 0 || start < inputs; start += DEPTH) {  // without inputs the bias is left
    const int depth = std::min(DEPTH, inputs - start);
    // Rows whose stride is a multiple of a page would all be in one set of the L1 cache.
    for (int row = 0; row < count; row++)
      memcpy(packed + row * DEPTH, rows + row * stride + start, depth * sizeof(float));
    for (int first = 0; first < outputs; first += PANEL) {
      const int features = std::min(PANEL, outputs - first), wide = features > WIDTH ? PANEL : WIDTH;
      const float* panel = weight + (int64_t)first * inputs + (int64_t)start * wide;
      const float* added = start ? nullptr : bias ? bias + first : zeros;
      const bool last = start + depth >= inputs;
      for (int tile = 0; tile < tiles; tile++) {
        const int64_t begin = (int64_t)count * tile / tiles, end = (int64_t)count * (tile + 1) / tiles;
        const int own = (int)(end - begin);
        const Compute run = wide == PANEL ? computing<2>(own, all_rows) : computing<1>(own, all_rows);
        run({packed + begin * DEPTH, panel, added, depth, features,
             output + begin * output_stride + first, output_stride, map.gelu && last});
      }
    }
  }
}

}  // namespace

// Outputs per panel of a packed weight, and per vector: a last panel of at most a vector has its width.
extern "C" int attnrx_panel() { return PANEL; }
extern "C" int attnrx_vector() { return WIDTH; }

// output [count, outputs of the last map] = the maps of `count` rows, one after the other. Returns 0, or 1 if out of
// memory.
extern "C" int attnrx_maps(const int64_t* described, int maps, const float* rows, int64_t stride, int64_t count,
                           float* output, int threads) {
  const Map* all_maps = (const Map*)described;
  const int64_t outputs = all_maps[maps - 1].outputs;
  int64_t most = 0;
  for (int i = 0; i + 1 < maps; i++) most = std::max(most, all_maps[i].outputs);
  const int64_t block = maps > 1 ? BLOCK : SINGLE, fewest = (count + block - 1) / block;
  const int64_t blocks = std::min((fewest + threads - 1) / threads * threads, count);
  int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t part = 0; part < blocks; part++) {
    const int64_t begin = count * part / blocks, end = count * (part + 1) / blocks;
    const int own = (int)(end - begin);
    float* packed = workspace.of((size_t)own * (DEPTH + 2 * most));
    float* between = packed + (size_t)own * DEPTH;
    if (!packed) {
      failed = 1;
      continue;
    }
    const float* from = rows + begin * stride;
    int64_t from_stride = stride;
    for (int i = 0; i < maps; i++) {
      const bool last = i + 1 == maps;
      float* to = last ? output + begin * outputs : between + (i % 2) * own * most;
      apply(all_maps[i], from, from_stride, own, to, all_maps[i].outputs, packed);
      from = to;
      from_stride = all_maps[i].outputs;
    }
  }
  return failed;
}

namespace {

typedef uint32_t Words __attribute__((vector_size(64)));

constexpr uint64_t PRIME = 0x9E3779B97F4A7C15ull;
constexpr uint32_t SMALL_PRIME = 2654435761u;

INLINED uint64_t mix(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * PRIME;
  return sum ^ sum >> 32;
}

// A number that depends on every byte and its place. Every step is a bijection of the word that it reads, so a change of
// one word always changes the result; other changes leave it with a chance of 2^-64.
uint64_t content_of(const char* bytes, size_t count) {
  constexpr int LANES = sizeof(Words) / sizeof(uint32_t), STATES = 4;
  Words states[STATES];
  for (int i = 0; i < STATES; i++)
    for (int lane = 0; lane < LANES; lane++) states[i][lane] = SMALL_PRIME * (uint32_t)(1 + lane + i * LANES);
  size_t at = 0;
  for (; at + sizeof(states) <= count; at += sizeof(states)) {
    Words words[STATES];
    memcpy(words, bytes + at, sizeof(words));
    UNROLLED for (int i = 0; i < STATES; i++) {
      states[i] = (states[i] ^ words[i]) * SMALL_PRIME;
      states[i] ^= states[i] >> 15;
    }
  }
  uint64_t rest[sizeof(states) / sizeof(uint64_t)] = {}, sum = count;
  memcpy(rest, bytes + at, count - at);
  for (uint64_t word : rest) sum = mix(sum, word);
  memcpy(rest, states, sizeof(states));
  for (uint64_t word : rest) sum = mix(sum, word);
  return sum;
}

}  // namespace

// A number that identifies the content of several tensors: their start addresses and bytes, in pairs. It does not depend
// on the number of threads.
extern "C" uint64_t attnrx_content(const int64_t* tensors, int count, int threads) {
  constexpr int64_t CHUNK = 1 << 16;
  uint64_t sum = PRIME;
  for (int i = 0; i < count; i++) {
    const char* bytes = (const char*)tensors[2 * i];
    const int64_t size = tensors[2 * i + 1], chunks = (size + CHUNK - 1) / CHUNK;
    uint64_t total = size;
    // Chunks are added after their number has been mixed in, so threads may take them in any order.
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && chunks > 4) reduction(+ : total)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
      total += mix(content_of(bytes + chunk * CHUNK, std::min(CHUNK, size - chunk * CHUNK)), (uint64_t)chunk + 1);
    sum = mix(sum, total);
  }
  return sum;
}
