// Linear maps of tokens on a CPU, one after the other or side by side, each with a GELU after it if requested.
#include "columns.hpp"

// output [count, outputs] = the maps of `count` rows, one after the other. With `joined`, all maps read the rows, and
// their outputs lie side by side. Returns 0, or 1 if out of memory.
extern "C" int attnrx_maps(const Map* maps, int number, int joined, const float* rows, int64_t stride, int64_t count,
                           float* output, int threads) {
  int64_t most = 0, all = 0;
  for (int i = 0; i < number; i++) {
    all += maps[i].outputs;
    if (i + 1 < number) most = std::max(most, maps[i].outputs);
  }
  const int64_t features = joined ? all : maps[number - 1].outputs;
  const int64_t block = std::min((int64_t)BLOCK, (count + threads - 1) / threads), blocks = (count + block - 1) / block;
  int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int64_t part = 0; part < blocks; part++) {
    const int64_t begin = count * part / blocks, end = count * (part + 1) / blocks;
    const int own = (int)(end - begin), padded = up(own, WIDTH);
    float* buffer = workspace.of(padded * (maps[0].inputs + 2 * most + features));
    if (!buffer) {
      failed = 1;
      continue;
    }
    const Columns entered = {buffer, (int)maps[0].inputs, own}, left = {buffer + padded * maps[0].inputs, (int)features, own};
    pack_keys(rows + begin * stride, stride, own, entered.features, 1.f, entered.data);
    if (joined) {
      for (int i = 0, first = 0; i < number; first += (int)maps[i++].outputs)
        multiply_by(maps[i], entered, left, first, maps[i].gelu ? GELU : STORED);
    } else {
      apply(maps, number, entered, left, STORED, nullptr, left.data + padded * features, most);
    }
    leave(left, own, output + begin * features, features);
  }
  return failed;
}
