// What stands between a decoder's matrix products: RMS norm, rotary positions, and the gate of its MLP. One pass each;
// every rounding to bfloat16 happens where transformers' own code has it.
#include "tiles.h"

#include <cmath>

namespace {

using namespace fkv;

inline __m512 rounded(__m512 value) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
}

// e^x by 2^(x log2 e), relative error below 1e-6; infinite where x is too large, zero where it is too small.
inline __m512 exp_register(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896340736f));
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(power, whole);
    __m512 value = _mm512_set1_ps(1.3333558e-3f);
    for (const float factor : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(value, whole);
}

} // namespace

extern "C" {

// x and out [rows, dim], weight [dim], all dense: out = weight * bfloat16(x / sqrt(mean(x^2) + epsilon)).
void fkv_rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t dim, float epsilon,
                  int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const uint16_t *source = x + row * dim;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t column = 0; column < dim; column += kLanes) {
            const __m512 value = load_wide(source + column, first_lanes(dim - column));
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(dim);
        const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + epsilon));
        for (int64_t column = 0; column < dim; column += kLanes) {
            const __mmask16 here = first_lanes(dim - column);
            const __m512 normal = rounded(_mm512_mul_ps(load_wide(source + column, here), factor));
            store_narrow(out + row * dim + column, here, _mm512_mul_ps(load_wide(weight + column, here), normal));
        }
    }
}

// gate and up [rows, width] by their row strides, out dense: out = bfloat16(gate / (1 + e^-gate)) * up.
void fkv_gated_silu(const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t rows, int64_t width,
                    int64_t gate_stride, int64_t up_stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < width; column += kLanes) {
            const __mmask16 here = first_lanes(width - column);
            const __m512 value = load_wide(gate + row * gate_stride + column, here);
            const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp_register(_mm512_sub_ps(_mm512_setzero_ps(), value)));
            const __m512 active = rounded(_mm512_div_ps(value, below));
            store_narrow(out + row * width + column, here,
                         _mm512_mul_ps(active, load_wide(up + row * up_stride + column, here)));
        }
}

// x [batch, heads, rows, >= 2 half] by its strides (batch, head, row), in place; cosines and sines [rows, 2 half], or
// one such table a sequence, `table_batch` elements apart: x = bfloat16(x cos) + bfloat16(rotate_half(x) sin).
void fkv_rotate_rows(uint16_t *x, const uint16_t *cosines, const uint16_t *sines, const int64_t *shape,
                     const int64_t *strides, int64_t half, int64_t table_batch, int threads) {
    const int64_t batch = shape[0], heads = shape[1], rows = shape[2];
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < batch * rows; ++task) {
        const int64_t sequence = task / rows, row = task % rows;
        const uint16_t *cosine = cosines + sequence * table_batch + row * 2 * half;
        const uint16_t *sine = sines + sequence * table_batch + row * 2 * half;
        for (int64_t head = 0; head < heads; ++head) {
            uint16_t *at = x + sequence * strides[0] + head * strides[1] + row * strides[2];
            for (int64_t column = 0; column < half; column += kLanes) {
                const __mmask16 here = first_lanes(half - column);
                const __m512 first = load_wide(at + column, here), second = load_wide(at + half + column, here);
                const __m512 turned = _mm512_mul_ps(second, load_wide(sine + column, here));
                const __m512 other = _mm512_mul_ps(first, load_wide(sine + half + column, here));
                const __m512 kept = _mm512_mul_ps(first, load_wide(cosine + column, here));
                const __m512 left = _mm512_mul_ps(second, load_wide(cosine + half + column, here));
                store_narrow(at + column, here, _mm512_sub_ps(rounded(kept), rounded(turned)));
                store_narrow(at + half + column, here, _mm512_add_ps(rounded(left), rounded(other)));
            }
        }
    }
}
}
