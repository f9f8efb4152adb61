// Places chunk KV in a cache in one pass over the memory: keys are rotated by their chunk's distance, values are
// copied. KV stored in eight bits is multiplied by its scales in the same pass and rounded once.
#include "rotation.h"

namespace {

using namespace fkv;

struct Chunk {
    const Element *keys, *values;
    int64_t key_layer, key_head, value_layer, value_head, rows, start;
};

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

template <bool Interleaved>
void place_keys(const Element *source, Element *target, int64_t rows, const Angles &angles) {
    for (int64_t row = 0; row < rows; ++row, source += angles.dim, target += angles.dim)
        turn<Interleaved>(
            angles, [=](int64_t column, int64_t count) { return load(source + column, first_lanes(count)); },
            [=](int64_t column, int64_t count, Lanes value) { store(target + column, first_lanes(count), value); });
}

template <bool Interleaved>
void place_int8_keys(const int8_t *source, const uint16_t *scales, Element *target, int64_t rows,
                     const Angles &angles) {
    for (int64_t row = 0; row < rows; ++row, source += angles.dim, target += angles.dim)
        turn<Interleaved>(
            angles,
            [=](int64_t column, int64_t count) {
                return load_bytes(source + column, count) * load_halves(scales + column, count);
            },
            [=](int64_t column, int64_t count, Lanes value) { store(target + column, first_lanes(count), value); });
}

void place_int8_values(const int8_t *source, const uint16_t *scales, Element *target, int64_t rows, int64_t dim) {
    for (int64_t row = 0; row < rows; ++row, source += dim, target += dim) {
        const Lanes scale = splat(load_halves(scales + row, 1)[0]);
        walk(dim, [=](int64_t column, int64_t count) { return load_bytes(source + column, count) * scale; },
             [=](int64_t column, int64_t count, Lanes value) { store(target + column, first_lanes(count), value); });
    }
}

} // namespace

extern "C" {

// A chunk is eight numbers: addresses of its keys and of its values, elements from layer to layer and from head to head
// in keys and in values, its rows, and the row of the cache where it begins. Rows are dense everywhere. cosines and
// sines: float32 [chunks, half]. shape: a Layer.
void fkv_place_chunks(const int64_t *chunks, int64_t count, int64_t layer, const float *cosines, const float *sines,
                      Element *keys, Element *values, const int64_t *shape) {
    const Layer s(shape);
#pragma omp parallel for schedule(static) num_threads(s.threads)
    for (int64_t task = 0; task < count * s.parts(); ++task) {
        const int64_t number = task / s.parts(), part = task % s.parts(), head = part - s.key_heads;
        Chunk chunk;
        std::memcpy(&chunk, chunks + number * 8, sizeof chunk);
        if (part < s.key_heads) {
            (s.interleaved ? place_keys<true> : place_keys<false>)(
                chunk.keys + layer * chunk.key_layer + part * chunk.key_head,
                keys + part * s.key_head + chunk.start * s.key_dim, chunk.rows, {cosines, sines, number, s});
        } else {
            std::memcpy(values + head * s.value_head + chunk.start * s.value_dim,
                        chunk.values + layer * chunk.value_layer + head * chunk.value_head,
                        chunk.rows * s.value_dim * sizeof *values);
        }
    }
}

// The same for chunks in eight bits. A chunk is fourteen numbers: addresses of its keys, of its values, of the keys'
// float16 scales (one a channel) and of the values' (one a row); elements from layer to layer and from head to head in
// each of the four, in this order; its rows, and where it begins. Scales are dense.
void fkv_place_int8_chunks(const int64_t *chunks, int64_t count, int64_t layer, const float *cosines,
                           const float *sines, Element *keys, Element *values, const int64_t *shape) {
    const Layer s(shape);
#pragma omp parallel for schedule(static) num_threads(s.threads)
    for (int64_t task = 0; task < count * s.parts(); ++task) {
        const int64_t number = task / s.parts(), part = task % s.parts(), head = part - s.key_heads;
        Int8Chunk chunk;
        std::memcpy(&chunk, chunks + number * 14, sizeof chunk);
        if (part < s.key_heads)
            (s.interleaved ? place_int8_keys<true> : place_int8_keys<false>)(
                chunk.keys + layer * chunk.key_layer + part * chunk.key_head,
                chunk.key_scales + layer * chunk.key_scale_layer + part * chunk.key_scale_head,
                keys + part * s.key_head + chunk.start * s.key_dim, chunk.rows, {cosines, sines, number, s});
        else
            place_int8_values(chunk.values + layer * chunk.value_layer + head * chunk.value_head,
                              chunk.value_scales + layer * chunk.value_scale_layer + head * chunk.value_scale_head,
                              values + head * s.value_head + chunk.start * s.value_dim, chunk.rows, s.value_dim);
    }
}
}
