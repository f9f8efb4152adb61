// Context shifts: eight-bit differences, added to values as they are and to keys rotated as the chunk's keys were.
#include "rotation.h"

namespace {

using namespace fkv;

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

Shift shift_at(const int64_t *shifts, int64_t chunk) {
    Shift shift;
    std::memcpy(&shift, shifts + chunk * 7, sizeof shift);
    return shift;
}

// Adds lanes to what stands at a row.
struct Adding {
    Element *row;
    void operator()(int64_t column, int64_t count, Lanes change) const {
        const Mask here = first_lanes(count);
        store(row + column, here, load(row + column, here) + change);
    }
};

template <bool Interleaved>
void shift_keys(const Differences &from, Element *target, int64_t rows, float weight, const Angles &angles) {
    for (int64_t row = 0; row < rows; ++row)
        turn<Interleaved>(angles, from.row(row, weight), Adding{target + row * angles.dim});
}

void shift_values(const Differences &from, Element *target, int64_t rows, float weight) {
    for (int64_t row = 0; row < rows; ++row) walk(from.dim, from.row(row, weight), Adding{target + row * from.dim});
}

} // namespace

extern "C" {

// weights [2, count], of keys and of values; cosines and sines [count, half]. shape: a Layer.
void fkv_shift_chunks(const int64_t *shifts, int64_t count, int64_t layer, const float *weights, const float *cosines,
                      const float *sines, Element *keys, Element *values, const int64_t *shape) {
    const Layer s(shape);
#pragma omp parallel for schedule(static) num_threads(s.threads)
    for (int64_t task = 0; task < count * s.parts(); ++task) {
        const int64_t number = task / s.parts(), part = task % s.parts(), head = part - s.key_heads;
        const Shift shift = shift_at(shifts, number);
        if (part < s.key_heads)
            (s.interleaved ? shift_keys<true> : shift_keys<false>)(
                shift.of_keys(s, layer, part), keys + part * s.key_head + shift.start * s.key_dim, shift.rows,
                weights[number], {cosines, sines, number, s});
        else
            shift_values(shift.of_values(s, layer, head), values + head * s.value_head + shift.start * s.value_dim,
                         shift.rows, weights[count + number]);
    }
}
}
