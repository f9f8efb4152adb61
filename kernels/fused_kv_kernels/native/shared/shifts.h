// A shift of a chunk's KV as the operators on shifts take it: seven numbers in a table.
#pragma once

#include "rotation.h"

namespace fkv {

// Eight-bit differences [rows, dim] of one head, and a scale for each row.
struct Differences {
    const int8_t *bytes;
    const float *scales;
    int64_t dim;

    // Reads some lanes of one row, weighted.
    auto row(int64_t row, float weight) const {
        return [from = bytes + row * dim, factor = weight * scales[row]](int64_t column, int64_t count) {
            return load_bytes(from + column, count) * factor;
        };
    }
};

// Addresses of the first row to shift: of int8 keys [layers, heads, head rows, dim], of their float32 scales (one for
// each row), and of values and their scales. Then the rows between heads, the rows to shift, and the position of the
// first.
struct Shift {
    const int8_t *keys;
    const float *key_scales;
    const int8_t *values;
    const float *value_scales;
    int64_t head_rows, rows, start;

    Differences of_keys(const Layer &s, int64_t layer, int64_t head) const {
        const int64_t first = (layer * s.key_heads + head) * head_rows;
        return {keys + first * s.key_dim, key_scales + first, s.key_dim};
    }
    Differences of_values(const Layer &s, int64_t layer, int64_t head) const {
        const int64_t first = (layer * s.value_heads + head) * head_rows;
        return {values + first * s.value_dim, value_scales + first, s.value_dim};
    }
};

inline Shift shift_at(const int64_t *shifts, int64_t chunk) {
    Shift shift;
    std::memcpy(&shift, shifts + chunk * 7, sizeof shift);
    return shift;
}

} // namespace fkv
