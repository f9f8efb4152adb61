// What attention makes of the products of queries and keys: scale, soft cap, sinks and windows.
#pragma once

#include "vectors.h"

#include <cmath>

namespace fkv {

constexpr float kLog2E = 1.44269504088896340736f;

// Which keys a row sees, and how it scores them. Rows ascend, and so do their first keys.
struct Scoring {
    const int64_t *positions, *first_keys; // no first keys: rows see all keys from the first one on
    const float *sinks;                    // one a query head, or none
    float scale, softcap;                  // no cap: zero

    int64_t first(int64_t row) const { return first_keys ? first_keys[row] : 0; }
    int64_t limit(int64_t row) const { return positions[row] + 1; }
    bool capped() const { return softcap > 0.0f; }
    // What products are multiplied by before they are capped, and afterwards, where a score's weight is 2^score.
    float before_cap() const { return scale / softcap; }
    float after_cap() const { return capped() ? softcap * kLog2E : scale * kLog2E; }
    // What a head's sink adds to the sum of weights, which are relative to the highest score.
    float sink_weight(int64_t head, float highest) const {
        return sinks ? std::exp2(sinks[head] * kLog2E - highest) : 0.0f;
    }
};

} // namespace fkv
