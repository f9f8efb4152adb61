// Rows of numbers in eight bits, each with a scale.
#pragma once

#include "element.h"

namespace fkv {

constexpr int kMost = 127; // the largest magnitude of a number; unsigned bytes have 128 added

// The elements of a row times their factors.
inline Lanes scaled(const Element *row, const float *factors, int64_t column, int64_t dim) {
    const Mask here = first_lanes(dim - column);
    return load(row + column, here) * load_floats(factors + column, here);
}

// silu(gate) * up
inline Lanes gated(Lanes gate, Lanes up) { return gate / (1.0f + exp_lanes(-gate)) * up; }

// Rounds a row, whose elements read(column) gives by lanes, so that `range` becomes kMost; returns its scale.
template <typename Read>
inline float round_row(int64_t dim, float range, const Read &read, uint8_t *out) {
    range = range < 1e-30f ? 1e-30f : range;
    const Lanes factor = splat(kMost / range);
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Lanes shifted = multiply_add(read(column), factor, splat(kRounding));
        store_bytes(out + column, whole_part(shifted) + 128, dim - column);
    }
    return range / kMost;
}

} // namespace fkv
