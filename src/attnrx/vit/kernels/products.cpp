// Linear maps of tokens on a CPU, one after the other or side by side, with GELU after them if wanted.
#include "columns.hpp"

// output [count, outputs] = the maps of `count` rows, one after the other; with `joined` all maps read the rows, and
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
