// One round of bipartite token merging on a CPU (Bolya et al., 2023).
//
// Patches at even positions are matched with the most similar ones at odd positions. The most similar pairs are merged
// into means weighted by size. Similarities of a tile of rows stay in registers, and no matrix of them is written.
#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "vectors.hpp"

namespace {

// The arguments, passed from Python: start addresses, and strides of images and tokens in floats. The first `prefix`
// tokens are not patches. Compared rows, sizes, weights and outputs include them, but indices do not.
struct Merge {
  int64_t tokens, tokens_image, tokens_row, width;
  int64_t compared, compared_image, compared_row, features;
  int64_t images, prefix, count, merged;
  int64_t distances, lengths;  // flags: squared distances instead of cosines, and kept norms of merged patches
  int64_t sizes, weights, indices, output, output_sizes, output_indices, output_destinations;

  const float* row_of(int64_t start, int64_t image_stride, int64_t row_stride, int image, int patch) const {
    return (const float*)start + image * image_stride + (prefix + patch) * row_stride;
  }
  const float* sizes_of(int image) const { return (const float*)sizes + image * (prefix + count) + prefix; }
  const float* weights_of(int image) const { return (const float*)weights + image * (prefix + count) + prefix; }
};

// What the similarity needs of one set besides its products: squares and inverse weights, or inverse norms. `added` is
// infinite for the columns that pad the last vector, so they are never the most similar.
struct Side {
  std::vector<float> packed, squares, weights, added;
};

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Squared norms are summed in the order of `multiply`, so the distance of equal patches is exactly zero.
void sum_squares(const Side& side, int count, int length, float* to) {
  const int padded = up(count, WIDTH);
  for (int first = 0; first < padded; first += WIDTH) {
    const int panel = first / PANEL * PANEL, wide = padded - panel < PANEL ? WIDTH : PANEL;
    const float* from = side.packed.data() + (int64_t)panel * length + (first - panel);
    Vector sum = {};
    for (int i = 0; i < length; i++, from += wide) sum += load(from) * load(from);
    store(to + first, sum);
  }
}

void prepare(const Merge& merge, int image, int parity, Side& side) {
  const int count = ((int)merge.count + 1 - parity) / 2, padded = up(count, WIDTH), length = (int)merge.features;
  const float* rows = merge.row_of(merge.compared, merge.compared_image, merge.compared_row, image, parity);
  const float* weights = merge.weights_of(image) + parity;
  side.packed.resize((size_t)padded * length);
  for (auto* own : {&side.squares, &side.weights, &side.added}) own->resize(padded);
  pack_keys(rows, 2 * merge.compared_row, count, length, 1.f, side.packed.data());
  sum_squares(side, count, length, side.squares.data());
  for (int i = 0; i < padded; i++) {
    side.added[i] = i < count ? 0.f : -INFINITE;
    if (i >= count) side.weights[i] = 1.f;
    else if (merge.distances) side.weights[i] = 1.f / weights[2 * i];
    else side.weights[i] = 1.f / std::max(std::sqrt(side.squares[i]), 1e-12f);
  }
}

// Finds the most similar patch of the second set for N patches of the first, from `row` on. The first best one wins.
template <int N, bool DISTANCES>
void match(const float* rows, int64_t stride, int length, int row, const Side& first, const Side& second, int count,
           float* best, int32_t* nearest) {
  const int padded = up(count, WIDTH);
  Vector most[N];
  Integers where[N] = {}, lanes;
  for (int lane = 0; lane < WIDTH; lane++) lanes[lane] = lane;
  for (int n = 0; n < N; n++) most[n] = all(-INFINITE);
  const auto see = [&](int n, int column, Vector product) {
    Vector close = load(&second.added[column]);
    if constexpr (DISTANCES) {
      Vector distance = first.squares[row + n] + load(&second.squares[column]) - 2.f * product;
      close -= larger(distance, Vector{}) / (first.weights[row + n] + load(&second.weights[column]));
    } else {
      close += product * first.weights[row + n] * load(&second.weights[column]);
    }
    Integers closer = close > most[n];
    most[n] = closer ? close : most[n];
    where[n] = closer ? lanes + column : where[n];
  };
  for (int column = 0; column < padded; column += PANEL) {
    const float* panel = second.packed.data() + (int64_t)column * length;
    if (padded - column < PANEL) {
      Vector sums[N][1] = {};
      multiply(rows, stride, panel, length, sums);
      UNROLLED for (int n = 0; n < N; n++) see(n, column, sums[n][0]);
    } else {
      Vector sums[N][2] = {};
      multiply(rows, stride, panel, length, sums);
      UNROLLED for (int n = 0; n < N; n++) see(n, column, sums[n][0]);
      UNROLLED for (int n = 0; n < N; n++) see(n, column + WIDTH, sums[n][1]);
    }
  }
  for (int n = 0; n < N; n++) {
    int lane = 0;
    for (int other = 1; other < WIDTH; other++)
      if (most[n][other] > most[n][lane] || (most[n][other] == most[n][lane] && where[n][other] < where[n][lane]))
        lane = other;
    best[n] = most[n][lane];
    nearest[n] = where[n][lane];
  }
}

typedef void (*Match)(const float*, int64_t, int, int, const Side&, const Side&, int, float*, int32_t*);

template <bool DISTANCES, int... N>
Match matching(int rows, std::integer_sequence<int, N...>) {
  static constexpr Match known[] = {match<N + 1, DISTANCES>...};
  return known[rows - 1];
}

// Matches the patches `begin` to `end` of the first set in one image.
void match_rows(const Merge& merge, int image, int begin, int end, const Side& first, const Side& second, float* best,
                int32_t* nearest) {
  constexpr auto rows = std::make_integer_sequence<int, ROWS>{};
  const float* from = merge.row_of(merge.compared, merge.compared_image, merge.compared_row, image, 0);
  for (int row = begin; row < end; row += ROWS) {
    const int own = std::min(ROWS, end - row);
    const Match function = merge.distances ? matching<true>(own, rows) : matching<false>(own, rows);
    function(from + 2 * row * merge.compared_row, 2 * merge.compared_row, (int)merge.features, row, first, second,
             (int)merge.count / 2, best + row, nearest + row);
  }
}

float sum_of_squares(const float* row, int width) {
  Vector sum = {};
  int i = 0;
  for (; i + WIDTH <= width; i += WIDTH) sum += load(row + i) * load(row + i);
  float total = 0;
  for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
  for (; i < width; i++) total += row[i] * row[i];
  return total;
}

// Merges the most similar pairs of one image and writes the remaining tokens, in order.
void merge_image(const Merge& merge, int image, const Side& first, const Side& second, const float* best,
                 const int32_t* nearest) {
  const int count = (int)merge.count, width = (int)merge.width, left = (int)(merge.count - merge.merged);
  const int prefix = (int)merge.prefix;
  const float* patches = merge.row_of(merge.tokens, merge.tokens_image, merge.tokens_row, image, 0);
  const float* sizes = merge.sizes_of(image);
  const int64_t* indices = (const int64_t*)merge.indices + (int64_t)image * merge.count;
  float* output = (float*)merge.output + (int64_t)image * (prefix + left) * width;
  float* output_sizes = (float*)merge.output_sizes + (int64_t)image * (prefix + left);
  int64_t* output_indices = (int64_t*)merge.output_indices + (int64_t)image * left;
  int64_t* destinations = (int64_t*)merge.output_destinations + (int64_t)image * merge.count;
  for (int i = 0; i < prefix; i++, output += width) {
    memcpy(output, patches + (i - prefix) * merge.tokens_row, width * sizeof(float));
    *output_sizes++ = sizes[i - prefix];
  }
  std::vector<int> order((count + 1) / 2), place(count);
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  std::stable_sort(order.begin(), order.end(), [best](int a, int b) { return best[a] > best[b]; });
  order.resize((size_t)merge.merged);
  std::vector<float> total(sizes, sizes + count), length(merge.lengths ? count : 0);
  for (int source : order) {
    total[2 * nearest[source] + 1] += sizes[2 * source];
    place[2 * source] = -1;
  }
  for (int i = 0, next = 0; i < count; i++) {
    if (place[i] < 0) continue;
    place[i] = next;
    output_indices[next] = indices[i];
    output_sizes[next] = total[i];
    memcpy(output + (int64_t)next++ * width, patches + i * merge.tokens_row, width * sizeof(float));
  }
  for (int i = 0; i < count; i++) destinations[i] = place[i];
  for (int source : order) destinations[2 * source] = place[2 * nearest[source] + 1];
  const auto norm = [&](int i) { return std::sqrt((i % 2 ? second : first).squares[i / 2]); };
  for (int source : order) {
    const int goal = 2 * nearest[source] + 1;
    const float share = sizes[2 * source] / total[goal];
    const float *from = patches + 2 * source * merge.tokens_row, *old = patches + goal * merge.tokens_row;
    float* to = output + (int64_t)place[goal] * width;
    for (int i = 0; i < width; i++) to[i] += (from[i] - old[i]) * share;
    if (merge.lengths) length[goal] += (norm(2 * source) - norm(goal)) * share;
  }
  if (!merge.lengths) return;
  for (int source : order) {
    const int goal = 2 * nearest[source] + 1;
    if (place[goal] < 0) continue;
    float* to = output + (int64_t)place[goal] * width;
    // A mean of opposite patches can be zero, and stays zero.
    const float factor = (norm(goal) + length[goal]) / std::max(std::sqrt(sum_of_squares(to, width)), 1e-6f);
    for (int i = 0; i < width; i++) to[i] *= factor;
    place[goal] = -1;  // several sources may have the same goal, but it is scaled only once
  }
}

// Merges one image. `threads` threads match its patches.
void merge_one(const Merge& merge, int image, int threads) {
  thread_local Side sides[2];
  thread_local std::vector<float> most_similar;
  thread_local std::vector<int32_t> most_similar_at;
  Side &first = sides[0], &second = sides[1];  // by reference, because each thread has its own thread-local object
  const int rows = ((int)merge.count + 1) / 2;
  most_similar.resize(rows);
  most_similar_at.resize(rows);
  float* best = most_similar.data();
  int32_t* nearest = most_similar_at.data();
  prepare(merge, image, 0, first);
  prepare(merge, image, 1, second);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int part = 0; part < threads; part++)
    match_rows(merge, image, rows * part / threads, rows * (part + 1) / threads, first, second, best, nearest);
  merge_image(merge, image, first, second, best, nearest);
}

}  // namespace

// Merges `merged` pairs of patches in every image, at most as many as there are patches at even positions. Returns 0,
// or 1 if out of memory. Threads share the images, or the patches of one image if there are fewer images than threads.
extern "C" int attnrx_merge(const int64_t* described, int threads) {
  const Merge& merge = *(const Merge*)described;
  const int images = (int)merge.images;
  int failed = 0;
  const auto merge_image_by = [&](int image, int within) {
    try {
      merge_one(merge, image, within);
    } catch (const std::bad_alloc&) {
      return 1;
    }
    return 0;
  };
  if (images < threads) {  // not nested in the loop below, because nested regions start new threads every time
    for (int image = 0; image < images; image++) failed |= merge_image_by(image, threads);
    return failed;
  }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int image = 0; image < images; image++) failed |= merge_image_by(image, 1);
  return failed;
}
