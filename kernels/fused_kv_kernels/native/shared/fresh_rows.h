// Fresh rows that replace positions of a layer, as the operators that compare the two take them.
#pragma once

#include "rotation.h"

namespace fkv {

// keys and values by strides (key head, key row, value head, value row); row rows[i] replaces position selected[i].
struct FreshRows {
    const Element *keys, *values;
    const int64_t *strides, *rows, *selected;

    const Element *key(int64_t head, int64_t i) const { return keys + head * strides[0] + rows[i] * strides[1]; }
    const Element *value(int64_t head, int64_t i) const { return values + head * strides[2] + rows[i] * strides[3]; }
};

// Reads some lanes of what a fresh row changes in a stored one.
inline auto deviation(const Element *fresh, const Element *stored) {
    return [=](int64_t column, int64_t count) {
        const Mask here = first_lanes(count);
        return load(fresh + column, here) - load(stored + column, here);
    };
}

} // namespace fkv
