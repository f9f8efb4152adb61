// Deviation transfer: the mean deviation of a chunk's recomputed tokens, added to the stored KV of all its tokens.
#include "rotation.h"

namespace {

using namespace fkv;

constexpr int64_t kLargestDim = 1024; // operands.py takes no larger one

// Fresh keys and values, by strides as fkv_transfer takes them; row rows[i] replaces position selected[i].
struct FreshRows {
    const Element *keys, *values;
    const int64_t *strides, *rows, *selected;

    const Element *key(int64_t head, int64_t i) const { return keys + head * strides[0] + rows[i] * strides[1]; }
    const Element *value(int64_t head, int64_t i) const { return values + head * strides[2] + rows[i] * strides[3]; }
};

// Reads some lanes of what a fresh row changes in a stored one.
auto deviation(const Element *fresh, const Element *stored) {
    return [=](int64_t column, int64_t count) {
        const Mask here = first_lanes(count);
        return load(fresh + column, here) - load(stored + column, here);
    };
}

// One chunk: its part of the selected positions, its own positions, and what the sum is multiplied by.
struct Span {
    int64_t first, last, start, stop;
    float weight;
};

// The weighted sum of deviations, [dim].
struct Sum {
    alignas(64) float of[kLargestDim] = {};

    auto taking() {
        return [this](int64_t column, int64_t count, Lanes change) {
            const Mask here = first_lanes(count);
            store_floats(of + column, here, load_floats(of + column, here) + change);
        };
    }
    // Adds the sum times `weight` to `total`, if there is one.
    void tell(float weight, float *total, int64_t dim) const {
        for (int64_t column = 0; total && column < dim; ++column) total[column] += of[column] * weight;
    }
    auto reading(float weight) const {
        return [this, weight](int64_t column, int64_t count) {
            return load_floats(of + column, first_lanes(count)) * weight;
        };
    }
};

auto adding(Element *row) {
    return [=](int64_t column, int64_t count, Lanes change) {
        const Mask here = first_lanes(count);
        store(row + column, here, load(row + column, here) + change);
    };
}

template <bool Interleaved>
void correct_keys(const FreshRows &fresh, Element *keys, int64_t head, const Span &span, const float *cosines,
                  const float *sines, float *total, const Layer &s) {
    Sum sum;
    for (int64_t i = span.first; i < span.last; ++i) {
        const int64_t at = fresh.selected[i];
        turn<Interleaved, true>({cosines, sines, at, s}, deviation(fresh.key(head, i), keys + at * s.key_dim),
                                sum.taking());
    }
    sum.tell(span.weight, total, s.key_dim);
    for (int64_t at = span.start; at < span.stop; ++at)
        turn<Interleaved>({cosines, sines, at, s}, sum.reading(span.weight), adding(keys + at * s.key_dim));
}

void correct_values(const FreshRows &fresh, Element *values, int64_t head, const Span &span, float *total, int64_t dim) {
    Sum sum;
    for (int64_t i = span.first; i < span.last; ++i)
        walk(dim, deviation(fresh.value(head, i), values + fresh.selected[i] * dim), sum.taking());
    sum.tell(span.weight, total, dim);
    for (int64_t at = span.start; at < span.stop; ++at) walk(dim, sum.reading(span.weight), adding(values + at * dim));
}

} // namespace

extern "C" {

// fresh_keys and fresh_values by strides (key head, key row, value head, value row); row fresh_rows[i] of them replaces
// position selected[i] of the layer. bounds [chunks + 1] cuts `selected` by chunk, spans [chunks, 2] are the chunks'
// positions, weights [chunks] multiply the summed deviation. cosines and sines: float32 [positions, half]. What a chunk
// gets is added to key_totals [key heads, chunks, key dim] and value_totals likewise, unless they are null. shape: a
// Layer.
void fkv_transfer(const Element *fresh_keys, const Element *fresh_values, const int64_t *fresh_strides,
                  const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, const int64_t *spans,
                  const float *weights, int64_t chunks, const float *cosines, const float *sines, float *key_totals,
                  float *value_totals, Element *keys, Element *values, const int64_t *shape) {
    const Layer s(shape);
    const FreshRows fresh{fresh_keys, fresh_values, fresh_strides, fresh_rows, selected};
#pragma omp parallel for schedule(dynamic, 1) num_threads(s.threads)
    for (int64_t task = 0; task < chunks * s.parts(); ++task) {
        const int64_t chunk = task / s.parts(), part = task % s.parts(), head = part - s.key_heads;
        const Span span{bounds[chunk], bounds[chunk + 1], spans[2 * chunk], spans[2 * chunk + 1], weights[chunk]};
        if (span.first == span.last) continue;
        const auto total = [=](float *totals, int64_t row, int64_t dim) {
            return totals ? totals + (row * chunks + chunk) * dim : nullptr;
        };
        if (part < s.key_heads)
            (s.interleaved ? correct_keys<true> : correct_keys<false>)(fresh, keys + part * s.key_head, part, span,
                                                                       cosines, sines,
                                                                       total(key_totals, part, s.key_dim), s);
        else
            correct_values(fresh, values + head * s.value_head, head, span,
                           total(value_totals, head, s.value_dim), s.value_dim);
    }
}
}
