// How far shifts of chunk KV go along with what recomputed rows show: inner products, by chunk and head.
#include "shifts.h"

namespace {

using namespace fkv;

inline __m512 change(const uint16_t *fresh, const uint16_t *stored, __mmask16 here) {
    return _mm512_sub_ps(load_wide(fresh, here), load_wide(stored, here));
}

// Sums of the products of a row's change with its shift, and of the shift with itself.
struct Products {
    __m512 along = _mm512_setzero_ps(), square = _mm512_setzero_ps();

    inline void take(__m512 moved, __m512 shift) {
        along = _mm512_fmadd_ps(moved, shift, along);
        square = _mm512_fmadd_ps(shift, shift, square);
    }
};

inline void take_key(Products &sum, const uint16_t *fresh, const uint16_t *stored, const int8_t *shift, __m512 scale,
                     const float *cosine, const float *sine, int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const __mmask16 here = first_lanes(half - column);
        const int64_t other = column + half;
        const __m512 first = load_bytes(shift + column, here, scale), second = load_bytes(shift + other, here, scale);
        const __m512 c = _mm512_maskz_loadu_ps(here, cosine + column), s = _mm512_maskz_loadu_ps(here, sine + column);
        sum.take(change(fresh + column, stored + column, here), _mm512_fnmadd_ps(second, s, _mm512_mul_ps(first, c)));
        sum.take(change(fresh + other, stored + other, here), _mm512_fmadd_ps(first, s, _mm512_mul_ps(second, c)));
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes) {
        const __mmask16 here = first_lanes(dim - column);
        sum.take(change(fresh + column, stored + column, here), load_bytes(shift + column, here, scale));
    }
}

inline void take_value(Products &sum, const uint16_t *fresh, const uint16_t *stored, const int8_t *shift, __m512 scale,
                       int64_t dim) {
    for (int64_t column = 0; column < dim; column += kLanes) {
        const __mmask16 here = first_lanes(dim - column);
        sum.take(change(fresh + column, stored + column, here), load_bytes(shift + column, here, scale));
    }
}

} // namespace

extern "C" {

// Fresh rows and the layer as in fkv_transfer; bounds [count, 2] are each shift's part of `selected`, all of it inside
// the shift. cosines and sines [count, half]. out [count, heads, 4]: products and squares of keys, then of values.
void fkv_fit_shifts(const int64_t *shifts, int64_t count, int64_t layer, const float *cosines, const float *sines,
                    const uint16_t *fresh_keys, const uint16_t *fresh_values, const int64_t *fresh_strides,
                    const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, float *out,
                    const uint16_t *keys, const uint16_t *values, int64_t key_head, int64_t value_head, int64_t heads,
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
                     shift.keys + row * dim, _mm512_set1_ps(shift.key_scales[row]), cosines + chunk * half,
                     sines + chunk * half, half, dim);
            take_value(of_values, fresh_values + fresh_value, values + head * value_head + selected[i] * dim,
                       shift.values + row * dim, _mm512_set1_ps(shift.value_scales[row]), dim);
        }
        float *sums = out + task * 4;
        sums[0] = _mm512_reduce_add_ps(of_keys.along), sums[1] = _mm512_reduce_add_ps(of_keys.square);
        sums[2] = _mm512_reduce_add_ps(of_values.along), sums[3] = _mm512_reduce_add_ps(of_values.square);
    }
}
}
