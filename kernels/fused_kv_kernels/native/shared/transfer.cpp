// Deviation transfer: the mean deviation of a chunk's recomputed tokens, added to the stored KV of all its tokens.
#include "element.h"

namespace {

using namespace fkv;

constexpr int64_t kLargestDim = 1024; // operators.py hands over no larger one

inline Lanes difference(const Element *fresh, const Element *stored, Mask here) {
    return load(fresh, here) - load(stored, here);
}
inline void add(float *sum, Mask here, Lanes change) { store_floats(sum, here, load_floats(sum, here) + change); }
inline void add(Element *target, Mask here, const float *change) {
    store(target, here, load(target, here) + load_floats(change, here));
}

// Adds fresh - stored, turned back by the position's angles, to a sum.
void add_key_deviation(float *sum, const Element *fresh, const Element *stored, const float *cosine, const float *sine,
                       int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const Mask here = first_lanes(half - column);
        const int64_t other = column + half;
        const Lanes first = difference(fresh + column, stored + column, here);
        const Lanes second = difference(fresh + other, stored + other, here);
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        add(sum + column, here, first * c + second * s);
        add(sum + other, here, second * c - first * s);
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes) {
        const Mask here = first_lanes(dim - column);
        add(sum + column, here, difference(fresh + column, stored + column, here));
    }
}

// Adds a sum, turned by the position's angles, to a stored key.
void correct_key(Element *key, const float *sum, const float *cosine, const float *sine, int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const Mask here = first_lanes(half - column);
        const int64_t other = column + half;
        const Lanes first = load_floats(sum + column, here), second = load_floats(sum + other, here);
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        store(key + column, here, load(key + column, here) + (first * c - second * s));
        store(key + other, here, load(key + other, here) + (second * c + first * s));
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes)
        add(key + column, first_lanes(dim - column), sum + column);
}

} // namespace

extern "C" {

// fresh_keys and fresh_values by strides (key head, key row, value head, value row); row fresh_rows[i] of them replaces
// position selected[i] of the layer. bounds [chunks + 1] cuts `selected` by chunk, spans [chunks, 2] are the chunks'
// positions, weights [chunks] multiply the summed deviation. cosines and sines: float32 [positions, half].
void fkv_transfer(const Element *fresh_keys, const Element *fresh_values, const int64_t *fresh_strides,
                  const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, const int64_t *spans,
                  const float *weights, int64_t chunks, const float *cosines, const float *sines, Element *keys,
                  Element *values, int64_t key_head, int64_t value_head, int64_t heads, int64_t dim, int64_t half,
                  int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < chunks * heads; ++task) {
        const int64_t chunk = task / heads, head = task % heads;
        if (bounds[chunk] == bounds[chunk + 1]) continue;
        alignas(64) float key_sum[kLargestDim] = {}, value_sum[kLargestDim] = {};
        Element *layer_keys = keys + head * key_head, *layer_values = values + head * value_head;
        for (int64_t i = bounds[chunk]; i < bounds[chunk + 1]; ++i) {
            const int64_t at = selected[i];
            const Element *new_key = fresh_keys + head * fresh_strides[0] + fresh_rows[i] * fresh_strides[1];
            const Element *new_value = fresh_values + head * fresh_strides[2] + fresh_rows[i] * fresh_strides[3];
            add_key_deviation(key_sum, new_key, layer_keys + at * dim, cosines + at * half, sines + at * half, half,
                              dim);
            for (int64_t column = 0; column < dim; column += kLanes) {
                const Mask here = first_lanes(dim - column);
                add(value_sum + column, here,
                    difference(new_value + column, layer_values + at * dim + column, here));
            }
        }
        for (int64_t column = 0; column < dim; ++column) {
            key_sum[column] *= weights[chunk];
            value_sum[column] *= weights[chunk];
        }
        for (int64_t at = spans[2 * chunk]; at < spans[2 * chunk + 1]; ++at) {
            correct_key(layer_keys + at * dim, key_sum, cosines + at * half, sines + at * half, half, dim);
            for (int64_t column = 0; column < dim; column += kLanes)
                add(layer_values + at * dim + column, first_lanes(dim - column), value_sum + column);
        }
    }
}
}
