// Rows of activations or weights in eight bits, for products of integers, and scaling the products back.
#include "rounded_rows.h"

#include <vector>

using namespace fkv;

extern "C" {

// x [rows, dim], factors [dim], out [rows, dim], scales and ranges [rows], all dense: scales = ranges / 127, and
// out = 128 + round(x factors / scales). Without ranges, that of a row is max |x factors|. A row that is not finite has
// a scale that is not either.
void fkv_quantize_rows(const Element *x, const float *factors, const float *ranges, uint8_t *out, float *scales,
                       int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const Element *source = x + row * dim;
        const auto read = [&](int64_t column) { return scaled(source, factors, column, dim); };
        const float range = ranges ? ranges[row] : largest_magnitude(dim, read);
        scales[row] = round_row(dim, range, read, out + row * dim);
    }
}

// products [rows, 2 width], dense, each row times its scale: gate and up. out [rows, width] and scales [rows] are those
// of silu(gate) * up, as fkv_quantize_rows makes them.
void fkv_quantize_gated(const Element *products, const float *product_scales, const float *factors, uint8_t *out,
                        float *scales, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> hidden(round_up(width, kLanes));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const Element *gate = products + row * 2 * width, *up = gate + width;
            const Lanes scale = splat(product_scales[row]);
            const float largest = largest_magnitude(width, [&](int64_t column) {
                const Mask here = first_lanes(width - column);
                const Lanes whole = gated(load(gate + column, here) * scale, load(up + column, here) * scale);
                store_floats(hidden.data() + column, whole * load_floats(factors + column, here));
                return load_floats(hidden.data() + column);
            });
            const auto read = [&](int64_t column) { return load_floats(hidden.data() + column); };
            scales[row] = round_row(width, largest, read, out + row * width);
        }
    }
}

// x [rows, dim], dense: each row times its scale, in place.
void fkv_scale_rows(Element *x, const float *scales, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < dim; column += kLanes) {
            Element *const at = x + row * dim + column;
            const Mask here = first_lanes(dim - column);
            store(at, here, load(at, here) * splat(scales[row]));
        }
}
}
