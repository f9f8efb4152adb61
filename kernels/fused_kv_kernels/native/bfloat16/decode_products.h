// Products of a few query rows with keys and values that are read in place, on AVX512-BF16.
//
// A key is read once for up to kMostQueries queries: both are walked along their dimensions, and the lanes of a
// register are added up at the end. Values are taken two rows at a time, whose numbers are interleaved to pairs.
#pragma once

#include "element.h"
#include "lane_sums.h"

namespace fkv {

constexpr int kMostQueries = 6;   // with four keys, 24 accumulators
constexpr int64_t kStep = 32;     // bfloat16 of a register, and of a cache line
constexpr int64_t kColumns = 32;  // sums of values are kept in a multiple of so many

inline __mmask32 first_of_step(int64_t count) {
    return count >= kStep ? 0xffffffffu : (1u << std::max<int64_t>(count, 0)) - 1u;
}
inline __m512bh load_step(const uint16_t *from, __mmask32 here) {
    return (__m512bh)_mm512_maskz_loadu_epi16(here, from);
}

// Scores of `Queries` rows for four keys, each of which is `Parts` rows of `dim` numbers in different places. A query
// has the parts side by side, filled up to whole registers with zeros.
template <int Queries, int Parts>
inline void score_four(const uint16_t *queries, int64_t query_step, const uint16_t *const (&keys)[Parts][4],
                       int64_t dim, float *scores, int64_t score_step) {
    Lanes sums[Queries][4] = {};
    const auto add = [&](const uint16_t *const (&four)[4], int64_t at, __mmask32 here) __attribute__((always_inline)) {
        __m512bh right[4];
#pragma GCC unroll 4
        for (int key = 0; key < 4; ++key) right[key] = load_step(four[key] + at, here);
#pragma GCC unroll 8
        for (int query = 0; query < Queries; ++query) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(queries + query * query_step + at);
#pragma GCC unroll 4
            for (int key = 0; key < 4; ++key) sums[query][key] = _mm512_dpbf16_ps(sums[query][key], left, right[key]);
        }
    };
    for (int part = 0; part < Parts; ++part, queries += round_up(dim, kStep)) {
        int64_t at = 0;
        for (; at + kStep <= dim; at += kStep) add(keys[part], at, 0xffffffffu);
        if (at < dim) add(keys[part], at, first_of_step(dim - at));
    }
#pragma GCC unroll 8
    for (int query = 0; query < Queries; ++query)
        _mm_storeu_ps(scores + query * score_step, sum_of_each(sums[query]));
}

// Adds weights [queries][weight_step] of two value rows, kColumns of them; the second row may be absent.
template <int Queries, int Parts>
inline void weigh_columns(const uint16_t *weights, int64_t weight_step, const uint16_t *values, int64_t value_step,
                          int64_t count, int64_t columns, float *sums, int64_t sum_step, Coming &coming) {
    Lanes low[Queries][Parts] = {}, high[Queries][Parts] = {};
    for (int64_t row = 0; row < count; row += 2) {
        const uint16_t *even = values + row * value_step, *odd = even + value_step;
        __m512bh first[Parts], second[Parts];
        if (row % 4 == 0) coming.fetch();
#pragma GCC unroll 2
        for (int part = 0; part < Parts; ++part) {
            const __mmask32 here = first_of_step(columns - part * kColumns);
            const __m512i of_even = _mm512_maskz_loadu_epi16(here, even + part * kColumns);
            const __m512i of_odd = row + 1 < count ? _mm512_maskz_loadu_epi16(here, odd + part * kColumns)
                                                   : _mm512_setzero_si512();
            first[part] = (__m512bh)_mm512_unpacklo_epi16(of_even, of_odd);
            second[part] = (__m512bh)_mm512_unpackhi_epi16(of_even, of_odd);
        }
#pragma GCC unroll 8
        for (int query = 0; query < Queries; ++query) {
            int32_t pair;
            std::memcpy(&pair, weights + query * weight_step + row, sizeof pair);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int part = 0; part < Parts; ++part) {
                low[query][part] = _mm512_dpbf16_ps(low[query][part], weight, first[part]);
                high[query][part] = _mm512_dpbf16_ps(high[query][part], weight, second[part]);
            }
        }
    }
    // Interleaving has put columns 0..3, 8..11, ... into one register, the others into the other.
    const __m512i before = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i after = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 8
    for (int query = 0; query < Queries; ++query)
#pragma GCC unroll 2
        for (int part = 0; part < Parts; ++part) {
            float *to = sums + query * sum_step + part * kColumns;
            store_floats(to, _mm512_permutex2var_ps(low[query][part], before, high[query][part]));
            store_floats(to + kLanes, _mm512_permutex2var_ps(low[query][part], after, high[query][part]));
        }
}

// sums [queries][sum_step] = weights of the value rows [count, dim].
template <int Queries>
inline void weigh_values(const uint16_t *weights, int64_t weight_step, const uint16_t *values, int64_t value_step,
                         int64_t count, int64_t dim, float *sums, int64_t sum_step, Coming &coming) {
    int64_t column = 0;
    for (; column + kColumns < dim; column += 2 * kColumns)
        weigh_columns<Queries, 2>(weights, weight_step, values + column, value_step, count, dim - column,
                                  sums + column, sum_step, coming);
    if (column < dim)
        weigh_columns<Queries, 1>(weights, weight_step, values + column, value_step, count, dim - column,
                                  sums + column, sum_step, coming);
}

} // namespace fkv
