// The RMS norm of rows, and what it multiplies a row by beside its weight.
#pragma once

#include "element.h"

#include <cmath>
#include <type_traits>

namespace fkv {

template <typename Number> inline float norm_factor(const Number *row, int64_t dim, float epsilon) {
    Lanes squares{};
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Lanes value = load(row + column, first_lanes(dim - column));
        squares += value * value;
    }
    const double mean = static_cast<double>(sum_lanes(squares)) / static_cast<double>(dim);
    return static_cast<float>(1.0 / std::sqrt(mean + epsilon));
}

// x and out [rows, dim], weight [dim], all dense: out = weight * (x / sqrt(mean(x^2) + epsilon)). The quotient is
// rounded to the dtype of x.
template <typename Number>
void norm_rows(const Number *x, const Element *weight, Element *out, int64_t rows, int64_t dim, float epsilon,
               int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const Number *source = x + row * dim;
        const float factor = norm_factor(source, dim, epsilon);
        for (int64_t column = 0; column < dim; column += kLanes) {
            const Mask here = first_lanes(dim - column);
            const Lanes quotient = load(source + column, here) * factor;
            const Lanes normal = std::is_same_v<Number, Element> ? rounded(quotient) : quotient;
            store(out + row * dim + column, here, load(weight + column, here) * normal);
        }
    }
}

} // namespace fkv
