// Attention on a CPU, unpadded: every head has its own rank and value dimension.
//
// One head of one image is computed at a time. Its keys are transposed into panels of two vectors, its values copied
// into panels. As many queries as fit the registers are multiplied with all keys, followed by softmax and the weighted
// sum of the values, while those rows of the map are in the L1 cache. No map is written to memory.
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
// stride of images in floats (0 if all are the same). Of every head: the first column of its pairs, how many there are,
// and how many rows precede them; the real parts of all pairs come first, then the imaginary ones.
struct Rotation {
  const float *cosines, *sines;
  int64_t image, patch;
  const int64_t *columns, *counts, *stills;
  int prefix;
};

// A bias of every pair of tokens: [images][heads][queries][keys], with the strides of images and heads in floats.
struct Bias {
  const float* values;
  int64_t image, head;
};

// Copies rows of a head, [tokens][rank], and rotates those of the patches.
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

// Values in panels of two vectors of features, or of one: [keys][features of the panel], followed by zeros.
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
  int keys, rank, reads;
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

// Replaces a row of scores (base-2 logarithms) by weights and returns one over their sum.
INLINED float weigh(float* row, int padded) {
  Vector most = load(row), sum = {};
  for (int i = WIDTH; i < padded; i += WIDTH) most = larger(load(row + i), most);
  float top = most[0], total = 0;
  for (int lane = 1; lane < WIDTH; lane++) top = most[lane] > top ? most[lane] : top;
  for (int i = 0; i < padded; i += WIDTH) {
    Vector weights = power_of_two(load(row + i) - top);
    store(row + i, weights);
    sum += weights;
  }
  for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
  return 1.f / total;
}

const float TO_BASE_TWO = 1.4426950408889634f;

INLINED void add_bias(float* row, const float* bias, int keys) {
  int i = 0;
  for (; i + WIDTH <= keys; i += WIDTH) store(row + i, load(row + i) + load(bias + i) * TO_BASE_TWO);
  for (; i < keys; i++) row[i] += bias[i] * TO_BASE_TWO;
}

// The outputs of N queries; `bias`, if given, are the rows of these queries.
template <int N>
void mix(const float* query, int64_t query_token, const float* key, const float* added, const float* value, float* map,
         float* output, int64_t output_token, Shape shape, const float* bias) {
  const int padded = up(shape.keys, WIDTH);
  for (int first = 0; first < padded; first += PANEL) {
    const float* panel = key + (int64_t)first * shape.rank;
    if (padded - first < PANEL) score<N, 1>(query, query_token, panel, shape.rank, added + first, map + first, padded);
    else score<N, 2>(query, query_token, panel, shape.rank, added + first, map + first, padded);
  }
  if (bias)
    for (int n = 0; n < N; n++) add_bias(map + n * padded, bias + (int64_t)n * shape.keys, shape.keys);
  float shares[N];
  for (int n = 0; n < N; n++) shares[n] = weigh(map + n * padded, padded);
  for (int first = 0; first < shape.reads; first += PANEL) {
    const float* panel = value + (int64_t)first * shape.keys;
    const int left = shape.reads - first;
    if (left <= WIDTH) read_out<N, 1>(map, padded, panel, shape.keys, shares, output + first, output_token, left);
    else read_out<N, 2>(map, padded, panel, shape.keys, shares, output + first, output_token, left);
  }
}

typedef void (*Mix)(const float*, int64_t, const float*, const float*, const float*, float*, float*, int64_t, Shape,
                    const float*);

template <int... N>
Mix of_rows(int rows, std::integer_sequence<int, N...>) {
  static constexpr Mix known[] = {mix<N + 1>...};
  return known[rows - 1];
}

// Computes the queries from `first` to `last` of one head of one image; false if out of memory.
bool mix_head(const Head& head, int number, int image, int first, int last, int keys, const float* sizes, float scale,
              const Rotation* rotation, const Bias* bias) {
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
  pack_keys(key_rows, key_token, keys, rank, scale * TO_BASE_TWO, key);
  if (rotation) {
    rotate(query, query_token, first, last, rank, *rotation, image, number, turned);
    query = turned - (int64_t)first * rank;
    query_token = rank;
  }
  pack_values(at(head.value, image * head.value_image), head.value_token, keys, reads, value);
  for (int i = 0; i < padded; i++) added[i] = i < keys ? (sizes ? std::log2(sizes[i]) : 0.f) : -INFINITY;
  const float* rows = bias ? bias->values + image * bias->image + number * bias->head : nullptr;
  float* output = (float*)at(head.output, image * head.output_image);
  // Tiles of nearly equal numbers of rows: a last tile of a single row would take as long as one of four.
  const int tiles = (last - first + ROWS - 1) / ROWS;
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t start = first + (int64_t)(last - first) * tile / tiles;
    const int64_t stop = first + (int64_t)(last - first) * (tile + 1) / tiles;
    of_rows((int)(stop - start), std::make_integer_sequence<int, ROWS>{})(
        query + start * query_token, query_token, key, added, value, map, output + start * head.output_token,
        head.output_token, {keys, rank, reads}, rows ? rows + start * keys : nullptr);
  }
  return true;
}

}  // namespace

// softmax(scale * query @ key^T + bias + log(sizes)) @ value for every head; `sizes` is null if every size is 1, and
// `rotation` and `bias` are null if there is none. Queries of a head are split if there are fewer heads than threads.
// Returns 0, or 1 if out of memory.
extern "C" int attnrx_attention(const int64_t* described, int heads, int images, int queries, int keys,
                                const float* sizes, float scale, int threads, const Rotation* rotation,
                                const Bias* bias) {
  const Head* all_heads = (const Head*)described;
  const int64_t units = (int64_t)images * heads;
  const int parts = threads > 1 && units < 8 * threads && units % threads ? threads : 1;
  int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t task = 0; task < units * parts; task++) {
    const int64_t image = task / parts / heads, part = task % parts;
    const int first = (int)(queries * part / parts), last = (int)(queries * (part + 1) / parts);
    const float* counted = sizes ? sizes + image * keys : nullptr;
    const int head = (int)(task / parts % heads);
    failed |= !mix_head(all_heads[head], head, (int)image, first, last, keys, counted, scale, rotation, bias);
  }
  return failed;
}

// The same where the features of a token lie in one row: those of all queries, of all keys, of all values, by head.
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
