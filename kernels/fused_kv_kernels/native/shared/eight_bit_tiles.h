// Products of eight-bit integers in registers.
//
// A left operand is a row of words of four unsigned bytes, and a right operand is packed as [inner words][columns], of
// signed bytes: the four products of two words are added to an int32. VPDPBUSD of AVX512-VNNI does that. With AVX2,
// VPMADDUBSW adds up the first two products of a word in sixteen bits, and the last two, and VPMADDWD adds up both
// sums. So two such neighbours of one sign may have a magnitude of 128 together: 128 times 255 fits.
#pragma once

#include "rounded_rows.h"

#if (defined(__AVX512VNNI__) && defined(__AVX512VBMI__)) || !defined(__AVX512F__)
#define FKV_HAS_BYTES
#endif

#if defined(FKV_HAS_BYTES)
namespace fkv {

constexpr int kByteTileRows = 6;
#if defined(__AVX512F__)
constexpr bool kAddsPairs = false; // whether neighbours are added up in sixteen bits
constexpr int kByteTileRegisters = 4; // 6 x 4 sums, 4 right operands and a broadcast fill 29 of 32 registers

inline WholeLanes add_products(WholeLanes sum, WholeLanes left, WholeLanes right) {
    return (WholeLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
}
#else
constexpr bool kAddsPairs = true;
constexpr int kByteTileRegisters = 2; // 6 x 2 sums leave 4 of 16 registers for operands and a product

inline WholeLanes add_products(WholeLanes sum, WholeLanes left, WholeLanes right) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)left, (__m256i)right);
    return sum + (WholeLanes)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif

// Rows of words, `step` words apart.
struct ByteRows {
    const uint32_t *from;
    int64_t step;
    ByteRows after(int64_t rows) const { return {from + rows * step, step}; }
};

// Columns of words, `step` words from one inner word to the next, and what sums of a column begin with, or nothing.
struct ByteColumns {
    const uint32_t *from;
    int64_t step;
    const int32_t *begin;
    ByteColumns after(int64_t columns) const { return {from + columns, step, begin ? begin + columns : nullptr}; }
};

// C[Rows, columns] = A B + what sums begin with, for whole tiles of columns. Rows of C are `step` numbers apart.
// Among other code, or with a constant number of words, the compiler runs out of registers.
template <int Rows, int Registers>
__attribute__((noinline)) void byte_tiles(int64_t columns, int64_t words, ByteRows a, ByteColumns b, int32_t *c,
                                          int64_t step) {
    asm("" : "+r"(words));
    for (int64_t column = 0; column < columns; column += Registers * kLanes, b = b.after(Registers * kLanes)) {
        WholeLanes sum[Rows][Registers];
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                sum[row][part] = b.begin ? load_whole(b.begin + part * kLanes) : WholeLanes{};
        for (int64_t word = 0; word < words; ++word) {
            WholeLanes right[Registers];
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                right[part] = load_whole(reinterpret_cast<const int32_t *>(b.from + word * b.step) + part * kLanes);
#pragma GCC unroll 8
            for (int row = 0; row < Rows; ++row) {
                const WholeLanes left = static_cast<int32_t>(a.from[row * a.step + word]) - WholeLanes{};
#pragma GCC unroll 4
                for (int part = 0; part < Registers; ++part)
                    sum[row][part] = add_products(sum[row][part], left, right[part]);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                store_whole(c + row * step + column + part * kLanes, sum[row][part]);
    }
}

// The same for up to kByteTileRows rows.
template <int Registers, int Rows = kByteTileRows>
inline void byte_rows(int64_t rows, int64_t columns, int64_t words, ByteRows a, ByteColumns b, int32_t *c,
                      int64_t step) {
    if constexpr (Rows > 0) {
        if (rows == Rows)
            byte_tiles<Rows, Registers>(columns, words, a, b, c, step);
        else
            byte_rows<Registers, Rows - 1>(rows, columns, words, a, b, c, step);
    }
}

// The same for any number of whole registers of columns.
template <int Registers = kByteTileRegisters>
inline void byte_product(int64_t rows, int64_t columns, int64_t words, ByteRows a, ByteColumns b, int32_t *c,
                         int64_t step) {
    if constexpr (Registers > 0) {
        const int64_t whole = columns / (Registers * kLanes) * Registers * kLanes;
        if (whole) byte_rows<Registers>(rows, whole, words, a, b, c, step);
        byte_product<Registers - 1>(rows, columns - whole, words, a, b.after(whole), c + whole, step);
    }
}

} // namespace fkv
#endif
