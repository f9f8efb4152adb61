// Places chunk KV in a cache in one pass over the memory: keys are rotated by their chunk's distance, values are
// copied. KV stored in eight bits is multiplied by its scales in the same pass and rounded once.
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

struct Int8Chunk {
    const int8_t *keys, *values;
    const uint16_t *key_scales, *value_scales;
    int64_t key_layer, key_head, value_layer, value_head;
    int64_t key_scale_layer, key_scale_head, value_scale_layer, value_scale_head;
    int64_t rows, start;
};

inline Lanes load_halves(const uint16_t *source, int64_t count) {
    uint16_t halves[kLanes] = {};
    std::memcpy(halves, source, std::clamp<int64_t>(count, 0, kLanes) * sizeof *halves);
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
#endif
}

inline Lanes load_scaled(const int8_t *source, const uint16_t *scales, int64_t count) {
    return load_bytes(source, count) * load_halves(scales, count);
}

void rotate_int8_row(const int8_t *source, const uint16_t *scales, Element *target, const float *cosine,
                     const float *sine, int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const int64_t count = half - column, other = half + column;
        const Mask here = first_lanes(count);
        const Lanes first = load_scaled(source + column, scales + column, count);
        const Lanes second = load_scaled(source + other, scales + other, count);
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        store(target + column, here, first * c - second * s);
        store(target + other, here, second * c + first * s);
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes)
        store(target + column, first_lanes(dim - column), load_scaled(source + column, scales + column, dim - column));
}

void scale_int8_row(const int8_t *source, const uint16_t *half_scale, Element *target, int64_t dim) {
    const Lanes scale = splat(load_halves(half_scale, 1)[0]);
    for (int64_t column = 0; column < dim; column += kLanes)
        store(target + column, first_lanes(dim - column), load_bytes(source + column, dim - column) * scale);
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

// The same for chunks in eight bits. A chunk is fourteen numbers: addresses of its keys, of its values, of the keys'
// float16 scales (one a channel) and of the values' (one a row); elements from layer to layer and from head to head in
// each of the four, in this order; its rows, and where it begins. Scales are dense.
void fkv_place_int8_chunks(const int64_t *chunks, int64_t count, int64_t layer, const float *cosines,
                           const float *sines, Element *keys, Element *values, int64_t key_head, int64_t value_head,
                           int64_t heads, int64_t dim, int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        Int8Chunk chunk;
        std::memcpy(&chunk, chunks + task / heads * 14, sizeof chunk);
        const int64_t head = task % heads;
        const int8_t *from_keys = chunk.keys + layer * chunk.key_layer + head * chunk.key_head;
        const int8_t *from_values = chunk.values + layer * chunk.value_layer + head * chunk.value_head;
        const uint16_t *key_scales = chunk.key_scales + layer * chunk.key_scale_layer + head * chunk.key_scale_head;
        const uint16_t *value_scales =
            chunk.value_scales + layer * chunk.value_scale_layer + head * chunk.value_scale_head;
        const float *cosine = cosines + task / heads * half, *sine = sines + task / heads * half;
        Element *to_keys = keys + head * key_head + chunk.start * dim;
        Element *to_values = values + head * value_head + chunk.start * dim;
        for (int64_t row = 0; row < chunk.rows; ++row)
            rotate_int8_row(from_keys + row * dim, key_scales, to_keys + row * dim, cosine, sine, half, dim);
        for (int64_t row = 0; row < chunk.rows; ++row)
            scale_int8_row(from_values + row * dim, value_scales + row, to_values + row * dim, dim);
    }
}
}
