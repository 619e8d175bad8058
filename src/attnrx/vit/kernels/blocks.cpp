// Pre-norm blocks on a CPU in one call: norm, attention, residual sum, norm, MLP, residual sum.
//
// The tokens of an image are transposed once, and all steps compute columns (columns.hpp). The scores of a panel of
// queries with all keys are columns, too. Softmax runs lane by lane, and the weighted sums of the values are the
// columns that the output projection reads.
#include "columns.hpp"

namespace {

struct Norm {
  int64_t weight, bias;
  float epsilon, unused;
};

// The arguments, passed from Python: start addresses (zero: none) and numbers. Only the first `outputs` of an image's
// `count` tokens are computed. The attention of the first token is written to `first_rows` [images][heads][count],
// unless it is zero. `maps` are the maps of queries, keys, values and outputs, then the maps of the MLP. `scales`
// multiply the two branches.
struct Block {
  int64_t tokens, output, first_rows, sizes, images, count, outputs, width, heads, ranks, reads, maps, mlp_maps;
  Norm norms[2];
  int64_t scales[2];
  float scale, unused;

  const Map& map(int number) const { return ((const Map*)maps)[number]; }
  int output_panels() const { return ((int)outputs + PANEL - 1) / PANEL; }
};

// The sum of f(vector of a feature) over all features of a vector of tokens, in chains that do not wait for each other.
template <typename Function>
INLINED Vector sum_of(const float* column, int wide, int features, Function f) {
  constexpr int CHAINS = 4;
  Vector sums[CHAINS] = {};
  int i = 0;
  for (; i + CHAINS <= features; i += CHAINS)
    UNROLLED for (int c = 0; c < CHAINS; c++) sums[c] += f(load(column + (int64_t)(i + c) * wide));
  for (; i < features; i++) sums[0] += f(load(column + (int64_t)i * wide));
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void normalize(const Columns& from, const Norm& norm, const Columns& to) {
  const float *weight = (const float*)norm.weight, *bias = (const float*)norm.bias;
  const int features = from.features;
  for (int panel = 0; panel < from.panels(); panel++) {
    const int wide = from.wide(panel);
    for (int lane = 0; lane < wide; lane += WIDTH) {
      const float* x = from.panel(panel) + lane;
      float* y = to.panel(panel) + lane;
      const Vector mean = sum_of(x, wide, features, [](Vector value) { return value; }) / (float)features;
      const auto square = [mean](Vector value) { return (value - mean) * (value - mean); };
      Vector inverse = sum_of(x, wide, features, square) / (float)features + norm.epsilon;
      for (int i = 0; i < WIDTH; i++) inverse[i] = 1.f / std::sqrt(inverse[i]);
      for (int i = 0; i < features; i++) {
        Vector normed = (load(x + (int64_t)i * wide) - mean) * inverse;
        if (weight) normed = normed * weight[i] + (bias ? bias[i] : 0.f);
        store(y + (int64_t)i * wide, normed);
      }
    }
  }
}

// Where a head's features begin among the queries, keys and values, their number, and where its outputs begin.
struct Head {
  int query, key, value, rank, reads, output;
};

template <int N, int VECTORS>
void score_tile(const float* keys, int step, const float* queries, int rank, const float* added, float* scores) {
  Vector sums[N][VECTORS];
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) sums[n][v] = all(added[n]);
  multiply(keys, 1, queries, rank, sums, step);
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(scores + (n * VECTORS + v) * WIDTH, sums[n][v]);
}

template <int N, int VECTORS>
void value_tile(const Columns& all_features, int first, const float* weights, const Vector* shares, float* to) {
  Vector sums[N][VECTORS] = {};
  for (int panel = 0; panel < all_features.panels(); panel++, weights += PANEL * VECTORS * WIDTH) {
    const int wide = all_features.wide(panel), count = std::min(wide, all_features.tokens - panel * PANEL);
    const float* values = all_features.panel(panel) + (int64_t)first * wide;
    if (wide == PANEL) multiply(values, PANEL, weights, count, sums);
    else multiply(values, WIDTH, weights, count, sums);
  }
  UNROLLED for (int n = 0; n < N; n++)
    UNROLLED for (int v = 0; v < VECTORS; v++) store(to + (n * VECTORS + v) * WIDTH, sums[n][v] * shares[v]);
}

template <int VECTORS>
struct Steps {
  void (*score)(const float*, int, const float*, int, const float*, float*);
  void (*value)(const Columns&, int, const float*, const Vector*, float*);
};

template <int VECTORS, int... N>
const Steps<VECTORS>& steps_of(int rows, std::integer_sequence<int, N...>) {
  static constexpr Steps<VECTORS> known[] = {{score_tile<N + 1, VECTORS>, value_tile<N + 1, VECTORS>}...};
  return known[rows - 1];
}

// The outputs of one head for a panel of queries. `scores` is a buffer with a panel per key, `scaled` with a panel per
// direction. The attention of the first query is written to `first_row`, unless that is null.
template <int VECTORS>
void attend_panel(const Columns& all_features, const Head& head, const float* queries, float scale, const float* added,
                  float* scores, float* scaled, float* to, float* first_row) {
  constexpr auto rows = std::make_integer_sequence<int, ROWS>{};
  constexpr int wide = VECTORS * WIDTH;
  const int keys = all_features.tokens;
  for (int i = 0; i < head.rank * wide; i += WIDTH) store(scaled + i, load(queries + i) * scale);
  for (int panel = 0; panel < all_features.panels(); panel++) {
    const int step = all_features.wide(panel), start = panel * PANEL;
    const float* own = all_features.panel(panel) + (int64_t)head.key * step;
    in_tiles(std::min(step, keys - start), [&](int first, int count) {
      steps_of<VECTORS>(count, rows)
          .score(own + first, step, scaled, head.rank, added + start + first, scores + (int64_t)(start + first) * wide);
    });
  }
  Vector most[VECTORS], sums[VECTORS] = {};
  for (int v = 0; v < VECTORS; v++) most[v] = load(scores + v * WIDTH);
  for (int key = 1; key < keys; key++)
    UNROLLED for (int v = 0; v < VECTORS; v++)
      most[v] = larger(load(scores + (int64_t)key * wide + v * WIDTH), most[v]);
  for (int key = 0; key < keys; key++)
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      float* place = scores + (int64_t)key * wide + v * WIDTH;
      // Differences are converted to base two, not scores, because a score near the largest float would overflow.
      const Vector weight = power_of_two((load(place) - most[v]) * 1.4426950408889634f);
      store(place, weight);
      sums[v] += weight;
    }
  for (int v = 0; v < VECTORS; v++) sums[v] = 1.f / sums[v];
  for (int key = 0; first_row && key < keys; key++) first_row[key] = scores[(int64_t)key * wide] * sums[0][0];
  in_tiles(head.reads, [&](int first, int count) {
    steps_of<VECTORS>(count, rows).value(all_features, head.value + first, scores, sums, to + (int64_t)first * wide);
  });
}

// The attention from the panels from `first` to `last`, as queries, to all tokens.
void attend(const Block& block, const Columns& all_features, const float* added, int first, int last,
            const Columns& to, float* buffer, float* first_rows) {
  const int64_t *ranks = (const int64_t*)block.ranks, *reads = (const int64_t*)block.reads;
  const int directions = (int)block.map(0).outputs;
  float *scores = buffer, *scaled = buffer + (int64_t)all_features.tokens * PANEL;
  Head head = {0, directions, 2 * directions, 0, 0, 0};
  for (int number = 0; number < block.heads; number++) {
    head.rank = (int)ranks[number];
    head.reads = (int)reads[number];
    for (int panel = first; panel < last; panel++) {
      const int wide = all_features.wide(panel);
      const float* queries = all_features.panel(panel) + (int64_t)head.query * wide;
      float* own = to.panel(panel) + (int64_t)head.output * wide;
      const auto run = wide == PANEL ? attend_panel<2> : attend_panel<1>;
      float* row = first_rows && panel == 0 ? first_rows + (int64_t)number * block.count : nullptr;
      run(all_features, head, queries, block.scale, added, scores, scaled, own, row);
    }
    head.query += head.rank;
    head.key += head.rank;
    head.value += head.reads;
    head.output += head.reads;
  }
}

// The columns of one image.
struct Image {
  Columns tokens, normed, features, attended;
  float* added;  // the logarithms of the sizes
};

size_t floats_of(const Block& block) {
  const int64_t all_features = block.map(0).outputs + block.map(1).outputs + block.map(2).outputs;
  return up((int)block.count, WIDTH) * (2 * block.width + all_features + block.map(2).outputs + 1);
}

Image image_of(const Block& block, float* buffer) {
  const int tokens = (int)block.count, width = (int)block.width, values = (int)block.map(2).outputs;
  const int64_t padded = up(tokens, WIDTH);
  const int all_features = 2 * (int)block.map(0).outputs + values;
  Image image;
  const auto next = [&](int features) {
    const Columns columns = {buffer, features, tokens};
    buffer += padded * features;
    return columns;
  };
  image.tokens = next(width);
  image.normed = next(width);
  image.features = next(all_features);
  image.attended = next(values);
  image.added = buffer;
  return image;
}

// The queries, keys and values of the panels from `first` to `last`.
void project(const Block& block, const Image& image, int number, int first, int last) {
  const float* rows = (const float*)block.tokens + (number * block.count + first * PANEL) * block.width;
  const Columns tokens = image.tokens.part(first, last), normed = image.normed.part(first, last);
  const Columns features = image.features.part(first, last);
  pack_keys(rows, block.width, tokens.tokens, tokens.features, 1.f, tokens.data);
  normalize(tokens, block.norms[0], normed);
  const int queries = std::max(first, std::min(last, block.output_panels())), directions = (int)block.map(0).outputs;
  multiply_by(block.map(0), image.normed.part(first, queries), image.features.part(first, queries), 0, STORED);
  multiply_by(block.map(1), normed, features, directions, STORED);
  multiply_by(block.map(2), normed, features, 2 * directions, STORED);
  const float* sizes = block.sizes ? (const float*)block.sizes + number * block.count : nullptr;
  for (int i = first * PANEL; i < std::min(last * PANEL, (int)block.count); i++)
    image.added[i] = sizes ? std::log(sizes[i]) : 0.f;
}

// The rest of the block, for the computed panels between `first` and `last`. Returns false if out of memory.
bool finish(const Block& block, const Image& image, int number, int first, int last) {
  constexpr int GROUP = BLOCK / PANEL;
  last = std::min(last, block.output_panels());
  if (first >= last) return true;
  const Map* mlp = &block.map(4);
  int64_t most = 0;
  for (int i = 0; i + 1 < block.mlp_maps; i++) most = std::max(most, mlp[i].outputs);
  const int64_t directions = block.map(0).outputs;
  float* buffer = workspace.of(std::max(2 * most * BLOCK, (block.count + directions) * PANEL));
  if (!buffer) return false;
  float* first_rows = block.first_rows ? (float*)block.first_rows + number * block.heads * block.count : nullptr;
  attend(block, image.features, image.added, first, last, image.attended, buffer, first_rows);
  const float *scale = (const float*)block.scales[0], *mlp_scale = (const float*)block.scales[1];
  multiply_by(block.map(3), image.attended.part(first, last), image.tokens.part(first, last), 0, ADDED, scale);
  for (int start = first; start < last; start += GROUP) {
    const int end = std::min(start + GROUP, last);
    const Columns tokens = image.tokens.part(start, end), normed = image.normed.part(start, end);
    normalize(tokens, block.norms[1], normed);
    apply(mlp, (int)block.mlp_maps, normed, tokens, ADDED, mlp_scale, buffer, most);
    float* rows = (float*)block.output + (number * block.outputs + start * PANEL) * block.width;
    leave(tokens, std::min(tokens.tokens, (int)block.outputs - start * PANEL), rows, block.width);
  }
  return true;
}

thread_local Workspace columns_of_image;

}  // namespace

// Returns 0, or 1 if out of memory. Threads share the images, or the panels of one image if there are fewer images than
// threads.
extern "C" int attnrx_block(const Block* described, int threads) {
  const Block& block = *described;
  const int images = (int)block.images, vectors = up((int)block.count, WIDTH) / WIDTH, panels = (vectors + 1) / 2;
  const size_t floats = floats_of(block);
  int failed = 0;
  if (images >= threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
    for (int number = 0; number < images; number++) {
      float* buffer = columns_of_image.of(floats);
      if (!buffer) {
        failed = 1;
        continue;
      }
      const Image image = image_of(block, buffer);
      project(block, image, number, 0, panels);
      failed |= !finish(block, image, number, 0, panels);
    }
    return failed;
  }
  float* buffer = columns_of_image.of(floats);
  if (!buffer) return 1;
  const Image image = image_of(block, buffer);
  const auto first = [&](int part) { return (vectors * part + threads) / (2 * threads); };
  for (int number = 0; number < images; number++) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) project(block, image, number, first(part), first(part + 1));
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : failed)
    for (int part = 0; part < threads; part++)
      failed |= !finish(block, image, number, first(part), first(part + 1));
  }
  return failed;
}
