// Sums of the lanes of four registers at a time.
#pragma once

#include "vectors.h"

namespace fkv {

// The sum of each register's lanes, in the same order for all four.
inline __m128 sum_of_each(const Lanes (&of)[4]) {
#if defined(__AVX512F__)
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
    const __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)first, (__m512d)second),
                                     (__m512)_mm512_unpackhi_pd((__m512d)first, (__m512d)second));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
    const __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

} // namespace fkv
