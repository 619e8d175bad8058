// Attention on a CPU, unpadded: every head has its own rank and value dimension.
//
// One head of one image is computed at a time. Its keys are transposed into panels of two vectors, and its values are
// copied into panels. As many queries as fit into the registers are multiplied with all keys. Then come softmax and the
// weighted sum of the values, while the rows of the map are still in the L1 cache. No map is written to memory. Heads
// that mix the score maps of blocks are computed together: for a few queries, first the rows of all block maps are
// computed, and then each head.
#include <new>
#include <numeric>
#include <vector>

#include "vectors.hpp"

namespace {

// The description of a head, passed from Python: start addresses, and strides of images and tokens in floats.
struct Head {
  int64_t query, query_image, query_token, key, key_image, key_token, value, value_image, value_token;
  int64_t output, output_image, output_token, rank, reads;
};

const float* at(int64_t start, int64_t offset) { return (const float*)start + offset; }

// The rotations of the patches, passed from Python: cosines and sines [images][patches][pairs of all heads], with the
// stride of images in floats (0 if all are the same). For every head: the first column of its pairs, the number of its
// pairs, and the number of rows before them. The real parts of all pairs come first, then the imaginary parts.
struct Rotation {
  const float *cosines, *sines;
  int64_t image, patch;
  const int64_t *columns, *counts, *stills;
  int prefix;
};

// A bias for every pair of tokens: [images][heads][queries][keys], with the strides of images and heads in floats.
struct Bias {
  const float* values;
  int64_t image, head;
};

// Copies rows of a head, [tokens][rank], and rotates the rows of patches.
void rotate(const float* rows, int64_t token, int first, int last, int rank, const Rotation& by, int64_t image, int head,
            float* to) {
  const int count = (int)by.counts[head], still = (int)by.stills[head], padding = rank - still - 2 * count;
  for (int i = first; i < last; i++, to += rank) {
    const float *row = rows + i * token, *real = row + still, *imaginary = real + count;
    if (i < by.prefix) {
      memcpy(to, row, rank * sizeof(float));
      continue;
    }
    memcpy(to, row, still * sizeof(float));
    memcpy(to + rank - padding, row + rank - padding, padding * sizeof(float));
    const int64_t start = image * by.image + (i - by.prefix) * by.patch + by.columns[head];
    const float *cosine = by.cosines + start, *sine = by.sines + start;
    float *out = to + still, *other = out + count;
    for (int p = 0; p < count; p++) {
      out[p] = real[p] * cosine[p] - imaginary[p] * sine[p];
      other[p] = imaginary[p] * cosine[p] + real[p] * sine[p];
    }
  }
}

// Copies values into panels of two vectors of features, or of one: [keys][features of the panel], padded with zeros.
void pack_values(const float* value, int64_t token, int keys, int reads, float* packed) {
  for (int start = 0; start < reads; start += PANEL) {
    const int wide = reads - start > WIDTH ? PANEL : WIDTH, own = reads - start < wide ? reads - start : wide;
    float* to = packed + (int64_t)start * keys;
    for (int i = 0; i < keys; i++, to += wide) {
      const float* row = value + i * token + start;
      if (own == wide) {
        for (int lane = 0; lane < wide; lane += WIDTH) store(to + lane, load(row + lane));
      } else {
        memset(to, 0, wide * sizeof(float));
        memcpy(to, row, own * sizeof(float));
      }
    }
  }
}

struct Shape {
  int keys, reads;
};

template <int N, int VECTORS>
INLINED void score(const float* query, int64_t token, const float* key, int rank, const float* added, float* to,
                   int padded) {
  Vector sums[N][VECTORS];
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) sums[n][v] = load(added + v * WIDTH);
  multiply(query, token, key, rank, sums);
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(to + n * padded + v * WIDTH, sums[n][v]);
}

template <int N, int VECTORS>
INLINED void read_out(const float* map, int padded, const float* value, int keys, const float* shares, float* output,
                      int64_t token, int features) {
  Vector sums[N][VECTORS] = {};
  multiply(map, padded, value, keys, sums);
  UNROLLED for (int n = 0; n < N; n++) {
    float row[VECTORS * WIDTH];
    float* to = features < VECTORS * WIDTH ? row : output + n * token;
    UNROLLED for (int v = 0; v < VECTORS; v++) store(to + v * WIDTH, sums[n][v] * shares[n]);
    if (to == row) memcpy(output + n * token, row, features * sizeof(float));
  }
}

constexpr float TO_BASE_TWO = 1.4426950408889634f;

// Replaces a row of scores by weights and returns one over their sum. Differences are converted to base two, not
// scores, because a score near the largest float would overflow.
INLINED float weigh(float* row, int padded) {
  Vector most = load(row), sum = {};
  for (int i = WIDTH; i < padded; i += WIDTH) most = larger(load(row + i), most);
  float top = most[0], total = 0;
  for (int lane = 1; lane < WIDTH; lane++) top = most[lane] > top ? most[lane] : top;
  for (int i = 0; i < padded; i += WIDTH) {
    Vector weights = power_of_two((load(row + i) - top) * TO_BASE_TWO);
    store(row + i, weights);
    sum += weights;
  }
  for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
  return 1.f / total;
}

// N rows of the score map, added to `added`.
template <int N>
void score_rows(const float* query, int64_t token, const float* key, int rank, const float* added, float* map,
                int padded) {
  for (int first = 0; first < padded; first += PANEL) {
    const float* panel = key + (int64_t)first * rank;
    if (padded - first < PANEL) score<N, 1>(query, token, panel, rank, added + first, map + first, padded);
    else score<N, 2>(query, token, panel, rank, added + first, map + first, padded);
  }
}

// The outputs of N queries, computed from their rows of the score map, which are overwritten.
template <int N>
void attend_rows(float* map, const float* value, float* output, int64_t output_token, Shape shape) {
  const int padded = up(shape.keys, WIDTH);
  float shares[N];
  for (int n = 0; n < N; n++) shares[n] = weigh(map + n * padded, padded);
  for (int first = 0; first < shape.reads; first += PANEL) {
    const float* panel = value + (int64_t)first * shape.keys;
    const int left = shape.reads - first;
    if (left <= WIDTH) read_out<N, 1>(map, padded, panel, shape.keys, shares, output + first, output_token, left);
    else read_out<N, 2>(map, padded, panel, shape.keys, shares, output + first, output_token, left);
  }
}

// The functions for a tile of queries, by its number of rows.
struct Steps {
  void (*score)(const float*, int64_t, const float*, int, const float*, float*, int);
  void (*attend)(float*, const float*, float*, int64_t, Shape);
};

template <int... N>
const Steps& steps_of(int rows, std::integer_sequence<int, N...>) {
  static constexpr Steps known[] = {{score_rows<N + 1>, attend_rows<N + 1>}...};
  return known[rows - 1];
}

// Tiles of nearly equal numbers of rows, because a last tile of a single row would take as long as one of four.
template <typename Compute>
void in_tiles(int first, int last, Compute compute) {
  const int tiles = (last - first + ROWS - 1) / ROWS;
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t start = first + (int64_t)(last - first) * tile / tiles;
    const int rows = (int)(first + (int64_t)(last - first) * (tile + 1) / tiles - start);
    compute(start, steps_of(rows, std::make_integer_sequence<int, ROWS>{}), rows);
  }
}

// The logarithms of the sizes, with -infinity for the padding.
void pack_sizes(const float* sizes, int keys, float* added) {
  for (int i = 0; i < up(keys, WIDTH); i++) added[i] = i < keys ? (sizes ? std::log(sizes[i]) : 0.f) : -INFINITY;
}

INLINED void add_bias(float* row, const float* bias, int keys) {
  int i = 0;
  for (; i + WIDTH <= keys; i += WIDTH) store(row + i, load(row + i) + load(bias + i));
  for (; i < keys; i++) row[i] += bias[i];
}

// Computes the queries from `first` to `last` of one head in one image. Returns false if out of memory.
bool attend_head(const Head& head, int number, int image, int first, int last, int keys, const float* sizes,
                 float scale, const Rotation* rotation, const Bias* bias) {
  const int padded = up(keys, WIDTH), rank = (int)head.rank, reads = (int)head.reads;
  const size_t wide = (size_t)up(reads, PANEL) * keys;
  const size_t rotated = rotation ? (size_t)(keys > last - first ? keys : last - first) * rank : 0;
  float* key = workspace.of((size_t)padded * (rank + 1 + ROWS) + wide + rotated);
  if (!key) return false;
  float *added = key + (size_t)padded * rank, *map = added + padded, *value = map + (size_t)ROWS * padded;
  float* turned = value + wide;  // the rotated keys until they are packed, and then the queries
  const float *key_rows = at(head.key, image * head.key_image), *query = at(head.query, image * head.query_image);
  int64_t key_token = head.key_token, query_token = head.query_token;
  if (rotation) {
    rotate(key_rows, key_token, 0, keys, rank, *rotation, image, number, turned);
    key_rows = turned;
    key_token = rank;
  }
  pack_keys(key_rows, key_token, keys, rank, scale, key);
  if (rotation) {
    rotate(query, query_token, first, last, rank, *rotation, image, number, turned);
    query = turned - (int64_t)first * rank;
    query_token = rank;
  }
  pack_values(at(head.value, image * head.value_image), head.value_token, keys, reads, value);
  pack_sizes(sizes, keys, added);
  const float* biases = bias ? bias->values + image * bias->image + number * bias->head : nullptr;
  float* output = (float*)at(head.output, image * head.output_image);
  in_tiles(first, last, [&](int64_t start, const Steps& steps, int rows) {
    steps.score(query + start * query_token, query_token, key, rank, added, map, padded);
    for (int n = 0; biases && n < rows; n++) add_bias(map + n * padded, biases + (start + n) * keys, keys);
    steps.attend(map, value, output + start * head.output_token, head.output_token, {keys, reads});
  });
  return true;
}

// Directions that all heads share, in blocks of `ranks[b]` neighbouring directions. Head h mixes the maps of the blocks
// with the weights mix[h * blocks + b].
struct Mixture {
  const int64_t* ranks;
  const float* mix;
  int blocks, heads;
};

// Computes `rows` rows of a head's score map: the sum of the weighted rows of the block maps, and `added`.
void mix_rows(const float* maps, const float* weights, const Mixture& mixture, const float* added, int rows,
              int padded, float* map) {
  constexpr int GROUP = 4;  // vectors of sums in registers: one weight is broadcast for all of them
  const int64_t size = (int64_t)ROWS * padded;
  for (int row = 0; row < rows; row++, maps += padded, map += padded) {
    int first = 0;
    for (; first + GROUP * WIDTH <= padded; first += GROUP * WIDTH) {
      Vector sums[GROUP];
      UNROLLED for (int v = 0; v < GROUP; v++) sums[v] = load(added + first + v * WIDTH);
      for (int block = 0; block < mixture.blocks; block++) {
        if (!mixture.ranks[block]) continue;
        const float* from = maps + block * size + first;
        UNROLLED for (int v = 0; v < GROUP; v++) sums[v] += load(from + v * WIDTH) * weights[block];
      }
      UNROLLED for (int v = 0; v < GROUP; v++) store(map + first + v * WIDTH, sums[v]);
    }
    for (; first < padded; first += WIDTH) {
      Vector sum = load(added + first);
      for (int block = 0; block < mixture.blocks; block++)
        if (mixture.ranks[block]) sum += load(maps + block * size + first) * weights[block];
      store(map + first, sum);
    }
  }
}

// Computes the queries from `first` to `last` of all heads in one image. Returns false if out of memory.
bool attend_mixed(const Head* heads, const Mixture& mixture, int image, int first, int last, int keys,
                  const float* sizes) {
  const int padded = up(keys, WIDTH), rank = (int)heads[0].rank;
  size_t wide = 0;
  for (int head = 0; head < mixture.heads; head++) wide += (size_t)up((int)heads[head].reads, PANEL) * keys;
  float* key = workspace.of((size_t)padded * (rank + 2 + ROWS * (mixture.blocks + 1)) + wide);
  if (!key) return false;
  float *added = key + (size_t)padded * rank, *zeros = added + padded, *map = zeros + padded;
  float *maps = map + (size_t)ROWS * padded, *values = maps + (size_t)mixture.blocks * ROWS * padded;
  int64_t direction = 0;
  for (int block = 0; block < mixture.blocks; direction += mixture.ranks[block++])
    pack_keys(at(heads[0].key, image * heads[0].key_image) + direction, heads[0].key_token, keys,
              (int)mixture.ranks[block], 1.f, key + direction * padded);
  float* value = values;
  for (int head = 0; head < mixture.heads; value += (size_t)up((int)heads[head++].reads, PANEL) * keys)
    pack_values(at(heads[head].value, image * heads[head].value_image), heads[head].value_token, keys,
                (int)heads[head].reads, value);
  pack_sizes(sizes, keys, added);
  memset(zeros, 0, padded * sizeof(float));
  in_tiles(first, last, [&](int64_t start, const Steps& steps, int rows) {
    const float* query = at(heads[0].query, image * heads[0].query_image) + start * heads[0].query_token;
    int64_t direction = 0;
    for (int block = 0; block < mixture.blocks; direction += mixture.ranks[block++])
      if (mixture.ranks[block])
        steps.score(query + direction, heads[0].query_token, key + direction * padded, (int)mixture.ranks[block],
                    zeros, maps + (int64_t)block * ROWS * padded, padded);
    const float* value = values;
    for (int head = 0; head < mixture.heads; head++) {
      const Head& own = heads[head];
      mix_rows(maps, mixture.mix + (int64_t)head * mixture.blocks, mixture, added, rows, padded, map);
      steps.attend(map, value, (float*)at(own.output, image * own.output_image) + start * own.output_token,
                   own.output_token, {keys, (int)own.reads});
      value += (size_t)up((int)own.reads, PANEL) * keys;
    }
  });
  return true;
}

// The number of parts into which the queries of a unit of work are split, so no thread is idle.
int parts_of(int64_t units, int threads) { return threads > 1 && units < 8 * threads && units % threads ? threads : 1; }

}  // namespace

// softmax(scale * query @ key^T + bias + log(sizes)) @ value for every head. `sizes` is null if every size is 1, and
// `rotation` and `bias` are null if there is none. A head's queries are split if there are fewer heads than threads.
// Returns 0, or 1 if out of memory.
extern "C" int attnrx_attention(const int64_t* described, int heads, int images, int queries, int keys,
                                const float* sizes, float scale, int threads, const Rotation* rotation,
                                const Bias* bias) {
  const Head* all_heads = (const Head*)described;
  const int64_t units = (int64_t)images * heads;
  const int parts = parts_of(units, threads);
  int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t task = 0; task < units * parts; task++) {
    const int64_t image = task / parts / heads, part = task % parts;
    const int first = (int)(queries * part / parts), last = (int)(queries * (part + 1) / parts);
    const float* counted = sizes ? sizes + image * keys : nullptr;
    const int head = (int)(task / parts % heads);
    failed |= !attend_head(all_heads[head], head, (int)image, first, last, keys, counted, scale, rotation, bias);
  }
  return failed;
}

// The same for heads that mix the score maps of blocks. Every head is described with the queries and keys of all
// directions, and `mix` [heads][blocks] includes the scale.
extern "C" int attnrx_mixed_attention(const int64_t* described, int heads, const int64_t* ranks, const float* mix,
                                      int blocks, int images, int queries, int keys, const float* sizes, int threads) {
  const Mixture mixture = {ranks, mix, blocks, heads};
  const int parts = parts_of(images, threads);
  int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t task = 0; task < (int64_t)images * parts; task++) {
    const int64_t image = task / parts, part = task % parts;
    const int first = (int)(queries * part / parts), last = (int)(queries * (part + 1) / parts);
    const float* counted = sizes ? sizes + image * keys : nullptr;
    failed |= !attend_mixed((const Head*)described, mixture, (int)image, first, last, keys, counted);
  }
  return failed;
}

// The same for features of a token in one row: first of all queries, then of all keys, then of all values, by head.
extern "C" int attnrx_joint_attention(const int64_t* ranks, const int64_t* reads, int heads, const float* features,
                                      float* output, int images, int tokens, const float* sizes, float scale,
                                      int threads, const Rotation* rotation, const Bias* bias) {
  const int64_t all_ranks = std::accumulate(ranks, ranks + heads, int64_t(0));
  const int64_t width = std::accumulate(reads, reads + heads, int64_t(0)), row = 2 * all_ranks + width;
  thread_local std::vector<Head> described;
  try {
    described.resize(heads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  const float *query = features, *value = features + 2 * all_ranks;
  for (int head = 0; head < heads; head++) {
    const int64_t starts[] = {(int64_t)query, (int64_t)(query + all_ranks), (int64_t)value, (int64_t)output};
    described[head] = {starts[0], tokens * row, row, starts[1], tokens * row, row, starts[2], tokens * row, row,
                       starts[3], tokens * width, width, ranks[head], reads[head]};
    query += ranks[head];
    value += reads[head];
    output += reads[head];
  }
  return attnrx_attention((const int64_t*)described.data(), heads, images, tokens, tokens, sizes, scale, threads,
                          rotation, bias);
}
