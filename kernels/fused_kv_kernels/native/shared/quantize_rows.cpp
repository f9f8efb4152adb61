// Rows of activations or weights in eight bits, each scaled by its own largest element, for products of integers, and
// scaling the products back.
#include "element.h"

namespace {
using namespace fkv;

// The elements of a row times their factors.
inline Lanes scaled(const Element *row, const float *factors, int64_t column, int64_t dim) {
    const Mask here = first_lanes(dim - column);
    return load(row + column, here) * load_floats(factors + column, here);
}
}

extern "C" {

// x [rows, dim], factors [dim], out [rows, dim] and scales [rows], all dense: scales = max |x factors| / most of a row,
// out = 128 + round(x factors / scales). A row that is not finite has a scale that is not either.
void fkv_quantize_rows(const Element *x, const float *factors, uint8_t *out, float *scales, int64_t rows, int64_t dim,
                       float most, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const Element *source = x + row * dim;
        const auto read = [&](int64_t column) { return scaled(source, factors, column, dim); };
        const float found = largest_magnitude(dim, read), largest = found < 1e-30f ? 1e-30f : found;
        const float factor = most / largest;
        scales[row] = largest / most;
        for (int64_t column = 0; column < dim; column += kLanes) {
            const Lanes shifted = multiply_add(read(column), splat(factor), splat(kRounding));
            store_bytes(out + row * dim + column, whole_part(shifted) + 128, dim - column);
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
