// Products and powers of eight-bit integers in registers, with AVX512-VNNI and AVX512-VBMI.
//
// VPDPBUSD multiplies four neighbouring unsigned bytes with four signed ones and adds the products to an int32. So a
// left operand is a row of words of four unsigned bytes, and a right operand is packed as [inner words][columns].
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include "element.h"

#include <cmath>

namespace fkv {

constexpr int kBytePanel = 64;   // keys of a panel: four registers of scores, and one of weights
constexpr int kByteTileRows = 6; // 6 x 4 sums, 4 right operands and a broadcast fill 29 of 32 registers

// C[Rows, 16 * Registers] = A[Rows, words] B[words, columns] + what `begin`, if given, has of a column. C is dense.
// Among other code, or with a constant number of words, the compiler runs out of registers.
template <int Rows, int Registers>
__attribute__((noinline)) void byte_tile(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t words,
                                         const int32_t *begin, int32_t *c) {
    asm("" : "+r"(words));
    __m512i sum[Rows][Registers];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            sum[row][part] = begin ? _mm512_loadu_si512(begin + part * kLanes) : _mm512_setzero_si512();
    for (int64_t word = 0; word < words; ++word) {
        __m512i right[Registers];
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) right[part] = _mm512_loadu_si512(b + word * ldb + part * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
            const __m512i left = _mm512_set1_epi32(static_cast<int>(a[row * lda + word]));
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                sum[row][part] = _mm512_dpbusd_epi32(sum[row][part], left, right[part]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            _mm512_storeu_si512(c + (row * Registers + part) * kLanes, sum[row][part]);
}

// The same for up to kByteTileRows rows.
template <int Registers, int Rows = kByteTileRows>
inline void byte_rows(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t words,
                      const int32_t *begin, int32_t *c) {
    if constexpr (Rows > 0) {
        if (rows == Rows)
            byte_tile<Rows, Registers>(a, lda, b, ldb, words, begin, c);
        else
            byte_rows<Registers, Rows - 1>(rows, a, lda, b, ldb, words, begin, c);
    }
}

// Powers of two as bytes, 255 * 2^(steps / kSteps), from a table. Whole steps: a byte is off by two hundredths at most.
struct BytePowers {
    static constexpr float kSteps = 16.0f;
    __m512i low, high;

    BytePowers() {
        alignas(64) uint8_t table[128] = {}; // the first is for all numbers below the others
        for (int i = 1; i < 128; ++i)
            table[i] = static_cast<uint8_t>(std::lrint(255.0f * std::exp2(static_cast<float>(i - 127) / kSteps)));
        low = _mm512_load_si512(table);
        high = _mm512_load_si512(table + 64);
    }

    // Of four registers of steps - 1, with steps <= 0. What is not a number has the power zero. The words of four bytes
    // come in the order that word_of_keys() gives.
    __m512i operator()(const __m512 (&before)[4]) const {
        __m512i numbers[4];
        // What is not a number, or too low, becomes the lowest integer, and that the lowest byte.
        for (int i = 0; i < 4; ++i) numbers[i] = _mm512_cvtps_epi32(before[i]);
        const __m512i first = _mm512_packs_epi32(numbers[0], numbers[1]);
        const __m512i second = _mm512_packs_epi32(numbers[2], numbers[3]);
        return _mm512_permutex2var_epi8(low, _mm512_packs_epi16(first, second), high);
    }
};

// Which word of a panel's weights holds those of the keys [4 * four, 4 * four + 4).
inline int64_t word_of_keys(int64_t four) { return four % 4 * 4 + four / 4; }

} // namespace fkv
#endif
