// Context shifts: eight-bit differences, added to values as they are and to keys rotated as the chunk's keys were.
#include "shifts.h"

namespace {

using namespace fkv;

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
