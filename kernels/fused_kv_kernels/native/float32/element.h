// Loading, storing and rounding float32, for the operators that are shared by all dtypes.
#pragma once

#include "vectors.h"

namespace fkv {

typedef float Element;

inline Lanes load(const Element *from, Mask here) { return load_floats(from, here); }
inline void store(Element *to, Mask here, Lanes value) { store_floats(to, here, value); }
// The value as it would be after storing and loading it: a product is not fused with the sum it goes into.
inline Lanes rounded(Lanes value) {
    asm("" : "+v"(value));
    return value;
}

} // namespace fkv
