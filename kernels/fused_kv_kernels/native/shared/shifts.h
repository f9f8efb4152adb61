// A shift of a chunk's KV as the operators on shifts take it: seven numbers in a table.
#pragma once

#include "element.h"

namespace fkv {

// Addresses of the first row to shift: of int8 keys [layers, heads, head rows, dim], of their float32 scales (one for
// each row), and of values and their scales. Then the rows between heads, the rows to shift, and the position of the
// first.
struct Shift {
    const int8_t *keys;
    const float *key_scales;
    const int8_t *values;
    const float *value_scales;
    int64_t head_rows, rows, start;
};

inline Shift shift_at(const int64_t *shifts, int64_t chunk) {
    Shift shift;
    std::memcpy(&shift, shifts + chunk * 7, sizeof shift);
    return shift;
}

} // namespace fkv
