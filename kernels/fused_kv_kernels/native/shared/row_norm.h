// What the RMS norm multiplies a row by, beside its weight.
#pragma once

#include "element.h"

#include <cmath>

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

} // namespace fkv
