// A shift of a chunk's KV as the operators on shifts take it: seven numbers in a table.
#pragma once

#include "element.h"

namespace fkv {

// Addresses of int8 keys [layers, heads, head rows, dim] and their float32 scales, one a row, of values and theirs (all
// of the first row to shift), rows from head to head, rows to shift, and the position where they begin.
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
