// Keys and values of a head in eight bits: panels of up to 64, packed for products of integers.
#pragma once

#include "byte_powers.h"

#if defined(FKV_HAS_BYTES)
namespace fkv {

constexpr int64_t kMeanKeys = 256; // the mean key is that of so many keys, evenly spaced
constexpr float kLeast = 1e-30f;   // numbers that are all smaller are rounded to zero

// The first key, an attention sink in most models, is a panel of its own.
inline int64_t panel_of(int64_t key) { return (key + kPanelKeys - 1) / kPanelKeys; }
inline int64_t first_of(int64_t panel) { return panel ? (panel - 1) * kPanelKeys + 1 : 0; }

// Words of four bytes that a key has, and columns of values in whole registers.
struct Packing {
    int64_t dim, value_dim, words, padded;

    Packing(int64_t dim, int64_t value_dim)
        : dim(dim), value_dim(value_dim), words(round_up(dim, kLanes) / 4), padded(round_up(value_dim, kLanes)) {}
    int64_t panel_floats() const { return kPanelKeys * (words + 2) + padded * (kPanelKeys / 4 + 1); }
};

// Words [words][64] of keys, what products with them begin with, their scales; words [16][padded] of values, and the
// scales of their columns.
struct Panel {
    uint32_t *keys;
    int32_t *begin;
    float *key_scales;
    uint32_t *values;
    float *value_scales;

    Panel(const Packing &p, float *memory)
        : keys(reinterpret_cast<uint32_t *>(memory)), begin(reinterpret_cast<int32_t *>(keys + kPanelKeys * p.words)),
          key_scales(reinterpret_cast<float *>(begin + kPanelKeys)),
          values(reinterpret_cast<uint32_t *>(key_scales + kPanelKeys)),
          value_scales(reinterpret_cast<float *>(values + kPanelKeys / 4 * p.padded)) {}
};

// Rows of one head, `step` elements apart.
struct HeadRows {
    const Element *from;
    int64_t step;
    const Element *operator[](int64_t row) const { return from + row * step; }
};

// The largest magnitude of a row.
template <typename Read> inline float row_range(int64_t dim, const Read &read) {
    const float found = largest_magnitude(dim, read);
    return found < kLeast ? kLeast : found;
}

inline WholeLanes nearest(Lanes value, Lanes factor) {
    return whole_part(multiply_add(value, factor, splat(kRounding)));
}

// Magnitudes of numbers and, where neighbours are added up, of their sums: what is rounded so that the largest becomes
// kMost stays in range, since rounding adds at most one to a sum.
inline Lanes with_sums(Lanes value, Lanes neighbour) {
    return kAddsPairs ? larger(absolute(value), absolute(value + neighbour)) : absolute(value);
}

// The mean of `count` keys, from some of them.
inline void mean_key(int64_t dim, HeadRows keys, int64_t count, float *mean) {
    const int64_t every = (count + kMeanKeys - 1) / kMeanKeys, taken = (count + every - 1) / every;
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Mask here = first_lanes(dim - column);
        Lanes sum{};
        for (int64_t key = 0; key < count; key += every) sum += load(keys[key] + column, here);
        store_floats(mean + column, here, sum * splat(1.0f / static_cast<float>(taken)));
    }
}

// Packs `count` keys after their mean is subtracted; returns whether all are finite.
inline bool pack_keys(const Packing &p, HeadRows keys, int64_t count, const float *mean, const Panel &to) {
    float check = 0.0f;
    for (int64_t key = 0; key < kPanelKeys; ++key) {
        int32_t sum = 0;
        float range = 0.0f;
        const auto read = [&](int64_t column) {
            const Mask here = first_lanes(p.dim - column);
            return load(keys[key] + column, here) - load_floats(mean + column, here);
        };
        const auto room = [&](int64_t column) { return with_sums(read(column), neighbours(read(column))); };
        if (key < count) range = row_range(p.dim, room);
        for (int64_t column = 0; column < p.dim; column += kLanes) {
            int8_t bytes[kLanes] = {};
            if (key < count) store_bytes(bytes, nearest(read(column), splat(kMost / range)), kLanes);
            for (const int8_t byte : bytes) sum += byte;
            for (int64_t word = 0; word < kLanes / 4; ++word)
                std::memcpy(to.keys + (column / 4 + word) * kPanelKeys + key, bytes + 4 * word, 4);
        }
        to.key_scales[key] = range / kMost;
        to.begin[key] = -128 * sum; // queries are stored with 128 added
        check += range - range;
    }
    return check == 0.0f;
}

// Packs `count` values; they are not finite either if the keys are not, so that this does not pass for a number.
inline void pack_values(const Packing &p, HeadRows values, int64_t count, bool finite, const Panel &to) {
    for (int64_t column = 0; column < p.padded; column += kLanes) {
        const Mask here = first_lanes(p.value_dim - column);
        Lanes most = splat(kLeast), check{}, before{};
        for (int64_t key = 0; key < count; ++key) {
            const Lanes value = load(values[key] + column, here);
            most = larger(most, with_sums(value, key % 2 ? before : Lanes{}));
            check += value - value;
            before = value;
        }
        const Lanes factor = splat(kMost) / most;
        const Lanes scale = multiply_add(most, splat(1.0f / kMost), check);
        store_floats(to.value_scales + column, finite ? scale : splat(std::numeric_limits<float>::quiet_NaN()));
        for (int64_t four = 0; four < kPanelKeys / 4; ++four) {
            WholeLanes words{};
            for (int i = 0; i < 4 && 4 * four + i < count; ++i)
                words |= (nearest(load(values[4 * four + i] + column, here), factor) & 255) << (8 * i);
            store_whole(reinterpret_cast<int32_t *>(to.values) + word_of_keys(four) * p.padded + column, words);
        }
    }
}

} // namespace fkv
#endif
