// Chunk KV into a cache: keys rotated by their chunk's distance, values copied, in one pass over the memory.
#include "element.h"

namespace {

using namespace fkv;

struct Chunk {
    const Element *keys, *values;
    int64_t key_layer, key_head, value_layer, value_head, rows, start;
};

void rotate_row(const Element *source, Element *target, const float *cosine, const float *sine, int64_t half,
                int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const Mask here = first_lanes(half - column);
        const Lanes first = load(source + column, here), second = load(source + half + column, here);
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        store(target + column, here, first * c - second * s);
        store(target + half + column, here, second * c + first * s);
    }
    std::memcpy(target + 2 * half, source + 2 * half, (dim - 2 * half) * sizeof *source);
}

} // namespace

extern "C" {

// A chunk is eight numbers: addresses of its keys and of its values, elements from layer to layer and from head to head
// in keys and in values, its rows, and the row of the cache where it begins. Rows are dense everywhere. cosines and
// sines: float32 [chunks, half].
void fkv_place_chunks(const int64_t *chunks, int64_t count, int64_t layer, const float *cosines, const float *sines,
                      Element *keys, Element *values, int64_t key_head, int64_t value_head, int64_t heads, int64_t dim,
                      int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        Chunk chunk;
        std::memcpy(&chunk, chunks + task / heads * 8, sizeof chunk);
        const int64_t head = task % heads;
        const Element *from_keys = chunk.keys + layer * chunk.key_layer + head * chunk.key_head;
        const Element *from_values = chunk.values + layer * chunk.value_layer + head * chunk.value_head;
        const float *cosine = cosines + task / heads * half, *sine = sines + task / heads * half;
        Element *to_keys = keys + head * key_head + chunk.start * dim;
        for (int64_t row = 0; row < chunk.rows; ++row)
            rotate_row(from_keys + row * dim, to_keys + row * dim, cosine, sine, half, dim);
        std::memcpy(values + head * value_head + chunk.start * dim, from_values,
                    chunk.rows * dim * sizeof *from_values);
    }
}
}
