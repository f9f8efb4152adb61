// Inner products of the deviations of recomputed rows with their chunk's shift, by chunk.
#include "fresh_rows.h"
#include "shifts.h"

#include <vector>

namespace {

using namespace fkv;

// Sums of the products of rows' changes with their shifts, and of the shifts with themselves.
struct Products {
    Lanes along{}, square{};

    template <typename Read> auto taking(const Read &deviation) {
        return [this, deviation](int64_t column, int64_t count, Lanes shift) {
            along += deviation(column, count) * shift;
            square += shift * shift;
        };
    }
};

template <bool Interleaved>
Products key_products(const FreshRows &fresh, const Element *keys, const Shift &shift, const Differences &from,
                      int64_t head, const int64_t *bounds, const Angles &angles) {
    Products sum;
    for (int64_t i = bounds[0]; i < bounds[1]; ++i)
        turn<Interleaved>(angles, from.row(fresh.selected[i] - shift.start, 1.0f),
                          sum.taking(deviation(fresh.key(head, i), keys + fresh.selected[i] * angles.dim)));
    return sum;
}

Products value_products(const FreshRows &fresh, const Element *values, const Shift &shift, const Differences &from,
                        int64_t head, const int64_t *bounds) {
    Products sum;
    for (int64_t i = bounds[0]; i < bounds[1]; ++i)
        walk(from.dim, from.row(fresh.selected[i] - shift.start, 1.0f),
             sum.taking(deviation(fresh.value(head, i), values + fresh.selected[i] * from.dim)));
    return sum;
}

} // namespace

extern "C" {

// Fresh rows and the layer as in fkv_transfer; bounds [count, 2] are each shift's part of `selected`, all of it inside
// the shift. cosines and sines [count, half]. out [count, 4]: products and squares of keys, then of
// values.
void fkv_fit_shifts(const int64_t *shifts, int64_t count, int64_t layer, const float *cosines, const float *sines,
                    const Element *fresh_keys, const Element *fresh_values, const int64_t *fresh_strides,
                    const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, float *out,
                    const Element *keys, const Element *values, const int64_t *shape) {
    const Layer s(shape);
    const FreshRows fresh{fresh_keys, fresh_values, fresh_strides, fresh_rows, selected};
    std::vector<Products> sums(count * s.parts());
#pragma omp parallel for schedule(dynamic, 1) num_threads(s.threads)
    for (int64_t task = 0; task < count * s.parts(); ++task) {
        const int64_t number = task / s.parts(), part = task % s.parts(), head = part - s.key_heads;
        const int64_t *mine = bounds + 2 * number;
        const Shift shift = shift_at(shifts, number);
        sums[task] =
            part < s.key_heads
                ? (s.interleaved ? key_products<true> : key_products<false>)(
                      fresh, keys + part * s.key_head, shift, shift.of_keys(s, layer, part), part, mine,
                      {cosines, sines, number, s})
                : value_products(fresh, values + head * s.value_head, shift, shift.of_values(s, layer, head), head,
                                 mine);
    }
    std::fill(out, out + 4 * count, 0.0f);
    for (int64_t task = 0; task < count * s.parts(); ++task) {
        float *sum = out + task / s.parts() * 4 + (task % s.parts() < s.key_heads ? 0 : 2);
        sum[0] += sum_lanes(sums[task].along), sum[1] += sum_lanes(sums[task].square);
    }
}
}
