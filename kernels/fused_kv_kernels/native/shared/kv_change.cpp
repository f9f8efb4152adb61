// What a prompt changes in a chunk's KV: summed up over prompts with weights, then kept in eight bits.
#include "rotation.h"

namespace {

using namespace fkv;

// Ten numbers: layers, heads, rows, columns, elements from layer to layer and from head to head after the change and
// before it, pairs of columns that are turned, and whether they are interleaved. Rows are dense, and so are the sums.
struct Shape {
    int64_t layers, heads, rows, dim, after_layer, after_head, before_layer, before_head, half, interleaved;

    explicit Shape(const int64_t *numbers) { std::memcpy(this, numbers, sizeof *this); }
};

constexpr int64_t kBlock = 64; // rows of a task

// KV before the change may be float32 beside KV of another dtype after it.
inline Lanes load_plain(const Element *from, Mask here) { return load(from, here); }
struct Wide {
    float value;
};
inline Lanes load_plain(const Wide *from, Mask here) { return load_floats(&from->value, here); }

template <bool Interleaved, typename Plain>
void add_rows(const Element *after, const Plain *before, float *sums, int64_t rows, const Angles &angles, float weight,
              bool first) {
    for (int64_t row = 0; row < rows; ++row, after += angles.dim, before += angles.dim, sums += angles.dim)
        turn<Interleaved>(
            angles, [=](int64_t column, int64_t count) { return load(after + column, first_lanes(count)); },
            [=](int64_t column, int64_t count, Lanes value) {
                const Mask here = first_lanes(count);
                const Lanes sum = first ? Lanes{} : load_floats(sums + column, here);
                const Lanes change = value - load_plain(before + column, here);
                store_floats(sums + column, here, multiply_add(splat(weight), change, sum));
            });
}

template <typename Plain>
void add_change(const Element *after, const Plain *before, float *sums, const Angles &angles, const Shape &s,
                float weight, bool first, int threads) {
    const int64_t blocks = (s.rows + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < s.layers * s.heads * blocks; ++task) {
        const int64_t part = task / blocks, layer = part / s.heads, head = part % s.heads;
        const int64_t row = task % blocks * kBlock, count = std::min(kBlock, s.rows - row);
        (s.interleaved ? add_rows<true, Plain> : add_rows<false, Plain>)(
            after + layer * s.after_layer + head * s.after_head + row * s.dim,
            before + layer * s.before_layer + head * s.before_head + row * s.dim,
            sums + (part * s.rows + row) * s.dim, count, angles, weight, first);
    }
}

} // namespace

extern "C" {

// sums += weight (after, turned - before), or, if they are the first, sums = that. cosines and sines: float32 [half],
// one angle for all rows. `wide` says that `before` is float32, whatever `after` is.
void fkv_add_change(const Element *after, const void *before, float *sums, const float *cosines, const float *sines,
                    const int64_t *shape, float weight, int wide, int first, int threads) {
    const Shape s(shape);
    const Angles angles(cosines, sines, s.half, s.dim);
    if (wide)
        add_change(after, static_cast<const Wide *>(before), sums, angles, s, weight, first, threads);
    else
        add_change(after, static_cast<const Element *>(before), sums, angles, s, weight, first, threads);
}

// x and out [rows, dim], scales [rows], all dense: scales = max |x| / 127 of a row, or `smallest` if that is more, and
// out = round(x / scales).
void fkv_compress_rows(const float *x, int8_t *out, float *scales, int64_t rows, int64_t dim, float smallest,
                       int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const float *source = x + row * dim;
        const auto read = [&](int64_t column) { return load_floats(source + column, first_lanes(dim - column)); };
        const float largest = largest_magnitude(dim, read) / 127.0f, scale = largest < smallest ? smallest : largest;
        scales[row] = scale;
        for (int64_t column = 0; column < dim; column += kLanes)
            store_bytes(out + row * dim + column, whole_part(read(column) / splat(scale) + kRounding), dim - column);
    }
}
}
