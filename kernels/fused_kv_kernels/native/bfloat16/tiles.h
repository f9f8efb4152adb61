// Products of bfloat16 matrices in registers, and the packed layouts that they read.
//
// VDPBF16PS multiplies pairs of neighbouring bfloat16 and adds both products to a float32. So a left operand is a row
// of 32-bit words (pairs along the inner dimension), and a right operand is packed as [inner pairs][columns] of words.
#pragma once

#include "vectors.h"

namespace fkv {

constexpr int kPanel = 64;   // keys of a packed panel: four registers of scores
constexpr int kTileRows = 6; // 6 x 4 accumulators, 4 right operands and a broadcast fill 29 of 32 registers

// C[rows, 16 * Registers] = A[rows, pairs] B[pairs, columns], or C = C * factor + A B with one factor a row.
template <int Rows, int Registers>
__attribute__((always_inline)) inline void register_tile(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float *c,
                          int64_t ldc, const float *factor) {
    __m512 sum[Rows][Registers];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            sum[row][part] = factor ? _mm512_mul_ps(_mm512_loadu_ps(c + row * ldc + part * kLanes),
                                                    _mm512_set1_ps(factor[row]))
                                    : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        __m512bh right[Registers];
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            right[part] = (__m512bh)_mm512_loadu_si512(b + pair * ldb + part * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[row * lda + pair]));
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                sum[row][part] = _mm512_dpbf16_ps(sum[row][part], left, right[part]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            _mm512_storeu_ps(c + row * ldc + part * kLanes, sum[row][part]);
}

template <int Registers>
inline void column_strip(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float *c,
                         int64_t ldc, const float *factor, int64_t rows) {
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows)
        register_tile<kTileRows, Registers>(a + row * lda, lda, b, ldb, pairs, c + row * ldc, ldc,
                                            factor ? factor + row : nullptr);
    const uint32_t *left = a + row * lda;
    float *out = c + row * ldc;
    const float *scale = factor ? factor + row : nullptr;
    switch (rows - row) {
    case 1: register_tile<1, Registers>(left, lda, b, ldb, pairs, out, ldc, scale); break;
    case 2: register_tile<2, Registers>(left, lda, b, ldb, pairs, out, ldc, scale); break;
    case 3: register_tile<3, Registers>(left, lda, b, ldb, pairs, out, ldc, scale); break;
    case 4: register_tile<4, Registers>(left, lda, b, ldb, pairs, out, ldc, scale); break;
    case 5: register_tile<5, Registers>(left, lda, b, ldb, pairs, out, ldc, scale); break;
    default: break;
    }
}

// The same for any number of rows and a number of columns that is a multiple of 16.
inline void product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float *c,
                    int64_t ldc, const float *factor, int64_t rows, int64_t columns) {
    int64_t column = 0;
    for (; column + 64 <= columns; column += 64)
        column_strip<4>(a, lda, b + column, ldb, pairs, c + column, ldc, factor, rows);
    switch ((columns - column) / kLanes) {
    case 1: column_strip<1>(a, lda, b + column, ldb, pairs, c + column, ldc, factor, rows); break;
    case 2: column_strip<2>(a, lda, b + column, ldb, pairs, c + column, ldc, factor, rows); break;
    case 3: column_strip<3>(a, lda, b + column, ldb, pairs, c + column, ldc, factor, rows); break;
    default: break;
    }
}

// A 16 x 16 matrix of words in registers, transposed: log2(16) rounds of interleaving.
inline void transpose_words(__m512i (&rows)[kLanes]) {
    __m512i other[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

// Keys [count, dim] of one head, `stride` elements apart, become a panel [dim / 2][64] of pairs; absent keys are zero.
inline void pack_keys(const uint16_t *keys, int64_t stride, int64_t count, int64_t dim, uint32_t *panel) {
    for (int64_t first = 0; first < kPanel; first += kLanes)
        for (int64_t pair = 0; pair < dim / 2; pair += kLanes) {
            const int64_t width = std::min<int64_t>(kLanes, dim / 2 - pair);
            const __mmask16 present = static_cast<__mmask16>((1u << width) - 1u);
            __m512i words[kLanes];
#pragma GCC unroll 16
            for (int64_t lane = 0; lane < kLanes; ++lane)
                words[lane] = first + lane < count
                                  ? _mm512_maskz_loadu_epi32(present, keys + (first + lane) * stride + 2 * pair)
                                  : _mm512_setzero_si512();
            transpose_words(words);
            for (int64_t row = 0; row < width; ++row)
                _mm512_storeu_si512(panel + (pair + row) * kPanel + first, words[row]);
        }
}

// Two rows of values [dim] become one row [padded] of pairs; `odd` may be absent, and then counts as zero.
inline void pack_value_pair(const uint16_t *even, const uint16_t *odd, int64_t dim, int64_t padded, uint32_t *pairs) {
    for (int64_t column = 0; column < padded; column += kLanes) {
        const int64_t present = std::clamp<int64_t>(dim - column, 0, kLanes);
        const __mmask16 mask = static_cast<__mmask16>((1u << present) - 1u);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + column));
        const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + column))
                                 : _mm512_setzero_si512();
        _mm512_storeu_si512(pairs + column, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

// 2^x for x <= 0, relative error below 1e-4, a fortieth of what rounding the result to bfloat16 costs.
inline __m512 exp2_register(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 value = _mm512_set1_ps(5.5171669e-2f);
    value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(2.4261149e-1f));
    value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(6.9326090e-1f));
    value = _mm512_fmadd_ps(value, part, _mm512_set1_ps(9.9992522e-1f));
    return _mm512_scalef_ps(value, whole);
}

} // namespace fkv
