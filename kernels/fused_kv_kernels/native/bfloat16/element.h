// Loading, storing and rounding bfloat16, for the operators that are shared by all dtypes.
#pragma once

#include "vectors.h"

namespace fkv {

typedef uint16_t Element;

inline Lanes load(const Element *from, Mask here) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, from)), 16));
}
inline void store(Element *to, Mask here, Lanes value) {
    _mm256_mask_storeu_epi16(to, here, (__m256i)_mm512_cvtneps_pbh(value));
}
// float32 beside it: the residual stream, to which layers add.
inline Lanes load(const float *from, Mask here) { return load_floats(from, here); }
inline void store(float *to, Mask here, Lanes value) { store_floats(to, here, value); }
// The value as it would be after storing and loading it.
inline Lanes rounded(Lanes value) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
}

} // namespace fkv
