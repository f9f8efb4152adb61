// Shifts of chunk KV: eight-bit differences added to keys, turned as the chunk's keys were, and to values.
#include "shifts.h"

namespace {

using namespace fkv;

inline void add(uint16_t *target, __mmask16 here, __m512 change) {
    store_narrow(target, here, _mm512_add_ps(load_wide(target, here), change));
}

void shift_key(uint16_t *key, const int8_t *change, __m512 scale, const float *cosine, const float *sine, int64_t half,
               int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const __mmask16 here = first_lanes(half - column);
        const __m512 first = load_bytes(change + column, here, scale);
        const __m512 second = load_bytes(change + half + column, here, scale);
        const __m512 c = _mm512_maskz_loadu_ps(here, cosine + column), s = _mm512_maskz_loadu_ps(here, sine + column);
        add(key + column, here, _mm512_fnmadd_ps(second, s, _mm512_mul_ps(first, c)));
        add(key + half + column, here, _mm512_fmadd_ps(first, s, _mm512_mul_ps(second, c)));
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes)
        add(key + column, first_lanes(dim - column), load_bytes(change + column, first_lanes(dim - column), scale));
}

} // namespace

extern "C" {

// weights [2, count], of keys and of values; cosines and sines [count, half].
void fkv_shift_chunks(const int64_t *shifts, int64_t count, int64_t layer, const float *weights, const float *cosines,
                      const float *sines, uint16_t *keys, uint16_t *values, int64_t key_head, int64_t value_head,
                      int64_t heads, int64_t dim, int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        const int64_t head = task % heads, chunk = task / heads;
        const Shift shift = shift_at(shifts, chunk);
        const int64_t first = (layer * heads + head) * shift.head_rows;
        for (int64_t row = 0; row < shift.rows; ++row) {
            uint16_t *key = keys + head * key_head + (shift.start + row) * dim;
            uint16_t *value = values + head * value_head + (shift.start + row) * dim;
            const __m512 key_scale = _mm512_set1_ps(weights[chunk] * shift.key_scales[first + row]);
            const __m512 value_scale = _mm512_set1_ps(weights[count + chunk] * shift.value_scales[first + row]);
            shift_key(key, shift.keys + (first + row) * dim, key_scale, cosines + chunk * half, sines + chunk * half,
                      half, dim);
            for (int64_t column = 0; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                add(value + column, here, load_bytes(shift.values + (first + row) * dim + column, here, value_scale));
            }
        }
    }
}
}
