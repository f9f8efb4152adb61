// Context shifts: eight-bit differences, added to values as they are and to keys rotated as the chunk's keys were.
#include "shifts.h"

namespace {

using namespace fkv;

inline void add(Element *target, Mask here, Lanes change) { store(target, here, load(target, here) + change); }

void shift_key(Element *key, const int8_t *change, float scale, const float *cosine, const float *sine, int64_t half,
               int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const Mask here = first_lanes(half - column);
        const Lanes first = load_bytes(change + column, half - column) * scale;
        const Lanes second = load_bytes(change + half + column, half - column) * scale;
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        add(key + column, here, first * c - second * s);
        add(key + half + column, here, second * c + first * s);
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes)
        add(key + column, first_lanes(dim - column), load_bytes(change + column, dim - column) * scale);
}

} // namespace

extern "C" {

// weights [2, count], of keys and of values; cosines and sines [count, half].
void fkv_shift_chunks(const int64_t *shifts, int64_t count, int64_t layer, const float *weights, const float *cosines,
                      const float *sines, Element *keys, Element *values, int64_t key_head, int64_t value_head,
                      int64_t heads, int64_t dim, int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        const int64_t head = task % heads, chunk = task / heads;
        const Shift shift = shift_at(shifts, chunk);
        const int64_t first = (layer * heads + head) * shift.head_rows;
        for (int64_t row = 0; row < shift.rows; ++row) {
            Element *key = keys + head * key_head + (shift.start + row) * dim;
            Element *value = values + head * value_head + (shift.start + row) * dim;
            const float key_scale = weights[chunk] * shift.key_scales[first + row];
            const float value_scale = weights[count + chunk] * shift.value_scales[first + row];
            shift_key(key, shift.keys + (first + row) * dim, key_scale, cosines + chunk * half, sines + chunk * half,
                      half, dim);
            const int8_t *change = shift.values + (first + row) * dim;
            for (int64_t column = 0; column < dim; column += kLanes)
                add(value + column, first_lanes(dim - column), load_bytes(change + column, dim - column) * value_scale);
        }
    }
}
}
