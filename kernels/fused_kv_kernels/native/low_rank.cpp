// Low-rank shifts of chunk KV: a small product of two matrices added to keys (turned to their positions) and values.
#include "tiles.h"

namespace {

using namespace fkv;

constexpr int64_t kLargestDim = 1024;
constexpr int64_t kLargestRank = 32;

struct Shift {
    const uint16_t *key_left, *key_right, *value_left, *value_right;
    const float *cosines, *sines;
    int64_t rows, start;
};

// One row of the product: out[dim] = left[rank] right[rank, dim].
inline void row_product(const uint16_t *left, const float *right, int64_t rank, int64_t dim, float *out) {
    for (int64_t column = 0; column < dim; column += kLanes) {
        const __mmask16 here = first_lanes(dim - column);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t inner = 0; inner < rank; ++inner) {
            const float factor = _mm512_cvtss_f32(load_wide(left + inner, 1));
            sum = _mm512_fmadd_ps(_mm512_set1_ps(factor), _mm512_maskz_loadu_ps(here, right + inner * dim + column), sum);
        }
        _mm512_mask_storeu_ps(out + column, here, sum);
    }
}

inline void widen(const uint16_t *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += kLanes)
        _mm512_mask_storeu_ps(to + i, first_lanes(count - i), load_wide(from + i, first_lanes(count - i)));
}

inline void add(uint16_t *target, __mmask16 here, __m512 change) {
    store_narrow(target, here, _mm512_add_ps(load_wide(target, here), change));
}

void add_turned(uint16_t *key, const float *change, const float *cosine, const float *sine, int64_t half, int64_t dim) {
    for (int64_t column = 0; column < half; column += kLanes) {
        const __mmask16 here = first_lanes(half - column);
        const __m512 first = _mm512_maskz_loadu_ps(here, change + column);
        const __m512 second = _mm512_maskz_loadu_ps(here, change + half + column);
        const __m512 c = _mm512_maskz_loadu_ps(here, cosine + column), s = _mm512_maskz_loadu_ps(here, sine + column);
        add(key + column, here, _mm512_fnmadd_ps(second, s, _mm512_mul_ps(first, c)));
        add(key + half + column, here, _mm512_fmadd_ps(first, s, _mm512_mul_ps(second, c)));
    }
    for (int64_t column = 2 * half; column < dim; column += kLanes) {
        const __mmask16 here = first_lanes(dim - column);
        add(key + column, here, _mm512_maskz_loadu_ps(here, change + column));
    }
}

} // namespace

extern "C" {

// A shift is eight numbers: addresses of keys' left [rows, rank] and right [heads, rank, dim], values' left and right,
// cosines and sines float32 [rows, half]; its rows, and where they begin. Keys and values as in fkv_place_chunks.
void fkv_add_low_rank(const int64_t *shifts, int64_t count, int64_t rank, uint16_t *keys, uint16_t *values,
                      int64_t key_head, int64_t value_head, int64_t heads, int64_t dim, int64_t half, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < count * heads; ++task) {
        Shift shift;
        std::memcpy(&shift, shifts + task / heads * 8, sizeof shift);
        const int64_t head = task % heads;
        alignas(64) float right[kLargestRank * kLargestDim / 4], change[kLargestDim];
        uint16_t *key = keys + head * key_head + shift.start * dim, *value = values + head * value_head + shift.start * dim;
        widen(shift.key_right + head * rank * dim, rank * dim, right);
        for (int64_t row = 0; row < shift.rows; ++row) {
            row_product(shift.key_left + row * rank, right, rank, dim, change);
            add_turned(key + row * dim, change, shift.cosines + row * half, shift.sines + row * half, half, dim);
        }
        widen(shift.value_right + head * rank * dim, rank * dim, right);
        for (int64_t row = 0; row < shift.rows; ++row) {
            row_product(shift.value_left + row * rank, right, rank, dim, change);
            for (int64_t column = 0; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                add(value + row * dim + column, here, _mm512_maskz_loadu_ps(here, change + column));
            }
        }
    }
}
}
