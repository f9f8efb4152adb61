// Powers of two as bytes, 255 * 2^x for x <= 0: the attention weights of a panel of keys, relative to its highest.
#pragma once

#include "eight_bit_tiles.h"

#if defined(FKV_HAS_BYTES)
#include <cmath>

namespace fkv {

constexpr int kPanelKeys = 64;
constexpr int kPanelRegisters = kPanelKeys / kLanes; // of scores

#if defined(__AVX512F__)
// From a table of whole steps: a byte is off by two hundredths at most.
struct BytePowers {
    static constexpr float kSteps = 16.0f, kAhead = -1.0f; // `before` is kSteps * x + kAhead
    __m512i low, high;

    BytePowers() {
        alignas(64) uint8_t table[128] = {}; // the first is for all numbers below the others
        for (int i = 1; i < 128; ++i)
            table[i] = static_cast<uint8_t>(std::lrint(255.0f * std::exp2(static_cast<float>(i - 127) / kSteps)));
        low = _mm512_load_si512(table);
        high = _mm512_load_si512(table + 64);
    }

    // What is not a number has the power zero. The words of four bytes come in the order that word_of_keys() gives.
    void operator()(const Lanes (&before)[kPanelRegisters], uint32_t *words) const {
        __m512i numbers[kPanelRegisters];
        // What is not a number, or too low, becomes the lowest integer, and that the lowest byte.
        for (int i = 0; i < kPanelRegisters; ++i) numbers[i] = _mm512_cvtps_epi32(before[i]);
        const __m512i first = _mm512_packs_epi32(numbers[0], numbers[1]);
        const __m512i second = _mm512_packs_epi32(numbers[2], numbers[3]);
        _mm512_storeu_si512(words, _mm512_permutex2var_epi8(low, _mm512_packs_epi16(first, second), high));
    }
};

// Which word of a panel's weights holds those of the keys [4 * four, 4 * four + 4).
inline int64_t word_of_keys(int64_t four) { return four % 4 * 4 + four / 4; }
#else
// From a polynomial, off by two thousandths before it is rounded.
struct BytePowers {
    static constexpr float kSteps = 1.0f, kAhead = 7.9943534f; // `before` is x + log2(255)

    // What is not a number has the power zero. The words of four bytes come in the order that word_of_keys() gives.
    void operator()(const Lanes (&before)[kPanelRegisters], uint32_t *words) const {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Lanes *const of = before + half * 4;
            const __m256i first = _mm256_packs_epi32(power(of[0]), power(of[1]));
            const __m256i second = _mm256_packs_epi32(power(of[2]), power(of[3]));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(words + half * kLanes), _mm256_packus_epi16(first, second));
        }
    }

  private:
    static __m256i power(Lanes x) {
        x = larger(x, splat(-9.0f)); // the second one where the first is not a number
        const Lanes shifted = x + kRounding, part = x - (shifted - kRounding);
        const Lanes curve = multiply_add(splat(0.23842854f), part, splat(0.70344909f));
        const Lanes value = multiply_add(curve, part, splat(1.00044325f));
        return _mm256_cvtps_epi32(value * power_of_two(whole_part(shifted)));
    }
};

// Which word of a panel's weights holds those of the keys [4 * four, 4 * four + 4).
inline int64_t word_of_keys(int64_t four) { return four / 8 * 8 + four % 2 * 4 + four % 8 / 2; }
#endif

} // namespace fkv
#endif
