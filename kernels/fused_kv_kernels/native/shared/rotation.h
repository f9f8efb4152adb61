// Turning keys by angles, in both layouts of the pairs, and the layer of a cache that operators write
// into.
#pragma once

#include "element.h"

namespace fkv {

// Nine numbers: elements from head to head in keys and in values, heads of each, their widths, pairs that are turned,
// whether the pairs are interleaved, and the number of threads. Rows are dense.
struct Layer {
    int64_t key_head, value_head, key_heads, value_heads, key_dim, value_dim, half, interleaved, threads;

    explicit Layer(const int64_t *numbers) { std::memcpy(this, numbers, sizeof *this); }
    // Keys and values are separate tasks: head `part` of the keys if it is less than their number, else of the values.
    int64_t parts() const { return key_heads + value_heads; }
};

// The angles of one key. Dimensions i and i + half form a pair, or, interleaved, 2 i and 2 i + 1.
struct Angles {
    const float *cosine, *sine;
    int64_t half, dim;

    Angles(const float *cosines, const float *sines, int64_t row, const Layer &layer)
        : cosine(cosines + row * layer.half), sine(sines + row * layer.half), half(layer.half), dim(layer.key_dim) {}
    Angles(const float *cosine, const float *sine, int64_t half, int64_t dim)
        : cosine(cosine), sine(sine), half(half), dim(dim) {}
};

// Calls take(column, lanes, number of them) for all dimensions of a key that is turned, or turned back. read(column,
// count) returns `count` dimensions of it, at most kLanes.
template <bool Interleaved, bool Back = false, typename Read, typename Take>
inline void turn(const Angles &angles, const Read &read, const Take &take) {
    const auto sines = [&](int64_t pair, int64_t count) {
        const Lanes sine = load_floats(angles.sine + pair, first_lanes(count));
        return Back ? -sine : sine;
    };
    const int64_t turned = 2 * angles.half;
    if constexpr (Interleaved) {
        Lanes sign = splat(1.0f);
        for (int lane = 0; lane < kLanes; lane += 2) sign[lane] = -1.0f;
        for (int64_t column = 0; column < turned; column += kLanes) {
            const int64_t count = std::min<int64_t>(turned - column, kLanes);
            const Lanes value = read(column, count);
            const Lanes cosine = twice(load_floats(angles.cosine + column / 2, first_lanes(count / 2)));
            const Lanes sine = twice(sines(column / 2, count / 2)) * sign;
            take(column, count, value * cosine + neighbours(value) * sine);
        }
    } else {
        for (int64_t column = 0; column < angles.half; column += kLanes) {
            const int64_t count = angles.half - column, other = angles.half + column;
            const Lanes first = read(column, count), second = read(other, count);
            const Lanes cosine = load_floats(angles.cosine + column, first_lanes(count)), sine = sines(column, count);
            take(column, count, first * cosine - second * sine);
            take(other, count, second * cosine + first * sine);
        }
    }
    for (int64_t column = turned; column < angles.dim; column += kLanes)
        take(column, angles.dim - column, read(column, angles.dim - column));
}

// Calls take(column, lanes, number of them) for all dimensions of what is not turned.
template <typename Read, typename Take> inline void walk(int64_t dim, const Read &read, const Take &take) {
    for (int64_t column = 0; column < dim; column += kLanes) take(column, dim - column, read(column, dim - column));
}

} // namespace fkv
