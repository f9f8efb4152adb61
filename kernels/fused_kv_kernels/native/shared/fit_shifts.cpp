// Inner products of the deviations of recomputed rows with their chunk's shift, by chunk and head.
#include "shifts.h"

namespace {

using namespace fkv;

inline Lanes change(const Element *fresh, const Element *stored, Mask here) {
    return load(fresh, here) - load(stored, here);
}

// Sums of the products of a row's change with its shift, and of the shift with itself.
struct Products {
    Lanes along{}, square{};

    inline void take(Lanes moved, Lanes shift) {
        along += moved * shift;
        square += shift * shift;
    }
};

inline void take_key(Products &sum, const Element *fresh, const Element *stored, const int8_t *shift, float scale,
                     const float *cosine, const float *sine, int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const Mask here = first_lanes(half - column);
        const int64_t other = column + half;
        const Lanes first = load_bytes(shift + column, half - column) * scale;
        const Lanes second = load_bytes(shift + other, half - column) * scale;
        const Lanes c = load_floats(cosine + column, here), s = load_floats(sine + column, here);
        sum.take(change(fresh + column, stored + column, here), first * c - second * s);
        sum.take(change(fresh + other, stored + other, here), second * c + first * s);
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes) {
        const Mask here = first_lanes(dim - column);
        sum.take(change(fresh + column, stored + column, here), load_bytes(shift + column, dim - column) * scale);
    }
}

inline void take_value(Products &sum, const Element *fresh, const Element *stored, const int8_t *shift, float scale,
                       int64_t dim) {
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Mask here = first_lanes(dim - column);
        sum.take(change(fresh + column, stored + column, here), load_bytes(shift + column, dim - column) * scale);
    }
}

} // namespace

extern "C" {

// Fresh rows and the layer as in fkv_transfer; bounds [count, 2] are each shift's part of `selected`, all of it inside
// the shift. cosines and sines [count, half]. out [count, heads, 4]: products and squares of keys, then of values.
void fkv_fit_shifts(const int64_t *shifts, int64_t count, int64_t layer, const float *cosines, const float *sines,
                    const Element *fresh_keys, const Element *fresh_values, const int64_t *fresh_strides,
                    const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, float *out,
                    const Element *keys, const Element *values, int64_t key_head, int64_t value_head, int64_t heads,
                    int64_t dim, int64_t half, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        const int64_t chunk = task / heads, head = task % heads;
        const Shift shift = shift_at(shifts, chunk);
        Products of_keys, of_values;
        for (int64_t i = bounds[2 * chunk]; i < bounds[2 * chunk + 1]; ++i) {
            const int64_t row = (layer * heads + head) * shift.head_rows + selected[i] - shift.start;
            const int64_t fresh_key = head * fresh_strides[0] + fresh_rows[i] * fresh_strides[1];
            const int64_t fresh_value = head * fresh_strides[2] + fresh_rows[i] * fresh_strides[3];
            take_key(of_keys, fresh_keys + fresh_key, keys + head * key_head + selected[i] * dim,
                     shift.keys + row * dim, shift.key_scales[row], cosines + chunk * half,
                     sines + chunk * half, half, dim);
            take_value(of_values, fresh_values + fresh_value, values + head * value_head + selected[i] * dim,
                       shift.values + row * dim, shift.value_scales[row], dim);
        }
        float *sums = out + task * 4;
        sums[0] = sum_lanes(of_keys.along), sums[1] = sum_lanes(of_keys.square);
        sums[2] = sum_lanes(of_values.along), sums[3] = sum_lanes(of_values.square);
    }
}
}
