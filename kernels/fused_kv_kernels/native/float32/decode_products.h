// Products of a few query rows with keys and values that are read in place, in float32.
//
// A key is read once for up to kMostQueries queries: both are walked along their dimensions, and the lanes of a
// register are added up at the end.
#pragma once

#include "element.h"
#include "lane_sums.h"

namespace fkv {

#if defined(__AVX512F__)
constexpr int kMostQueries = 6; // with four keys, or four registers of values, 24 accumulators
#else
constexpr int kMostQueries = 3;
#endif
constexpr int64_t kStep = kLanes;
constexpr int64_t kColumns = kLanes; // sums of values are kept in a multiple of so many

// Scores of `Queries` rows for four keys, each of which is `Parts` rows of `dim` numbers in different places. A query
// has the parts side by side, filled up to whole registers with zeros.
template <int Queries, int Parts>
inline void score_four(const float *queries, int64_t query_step, const float *const (&keys)[Parts][4], int64_t dim,
                       float *scores, int64_t score_step) {
    Lanes sums[Queries][4] = {};
    const auto add = [&](int part, int64_t at, const auto &load_key) __attribute__((always_inline)) {
        Lanes left[Queries];
#pragma GCC unroll 8
        for (int query = 0; query < Queries; ++query) left[query] = load_floats(queries + query * query_step + at);
#pragma GCC unroll 4
        for (int key = 0; key < 4; ++key) {
            const Lanes right = load_key(keys[part][key] + at);
#pragma GCC unroll 8
            for (int query = 0; query < Queries; ++query)
                sums[query][key] = multiply_add(left[query], right, sums[query][key]);
        }
    };
    for (int part = 0; part < Parts; ++part, queries += round_up(dim, kStep)) {
        int64_t at = 0;
        for (; at + kStep <= dim; at += kStep) add(part, at, [](const float *from) { return load_floats(from); });
        if (at < dim)
            add(part, at, [here = first_lanes(dim - at)](const float *from) { return load_floats(from, here); });
    }
#pragma GCC unroll 8
    for (int query = 0; query < Queries; ++query)
        _mm_storeu_ps(scores + query * score_step, sum_of_each(sums[query]));
}

// Adds weights [queries][weight_step] of value rows, Parts registers of their columns. Only of the last register some
// columns may be absent.
template <int Queries, int Parts>
inline void weigh_columns(const float *weights, int64_t weight_step, const float *values, int64_t value_step,
                          int64_t count, int64_t columns, float *sums, int64_t sum_step, Coming &coming) {
    Lanes sum[Queries][Parts] = {};
    const Mask last = first_lanes(columns - (Parts - 1) * kLanes);
    for (int64_t row = 0; row < count; ++row) {
        const float *from = values + row * value_step;
        if (row % 4 == 0) coming.fetch();
        Lanes right[Parts];
#pragma GCC unroll 4
        for (int part = 0; part < Parts; ++part) {
            const float *at = from + part * kLanes;
            right[part] = part + 1 < Parts ? load_floats(at) : load_floats(at, last);
        }
#pragma GCC unroll 8
        for (int query = 0; query < Queries; ++query) {
            const Lanes weight = splat(weights[query * weight_step + row]);
#pragma GCC unroll 4
            for (int part = 0; part < Parts; ++part)
                sum[query][part] = multiply_add(weight, right[part], sum[query][part]);
        }
    }
#pragma GCC unroll 8
    for (int query = 0; query < Queries; ++query)
#pragma GCC unroll 4
        for (int part = 0; part < Parts; ++part)
            store_floats(sums + query * sum_step + part * kLanes, sum[query][part]);
}

// sums [queries][sum_step] = weights of the value rows [count, dim].
template <int Queries>
inline void weigh_values(const float *weights, int64_t weight_step, const float *values, int64_t value_step,
                         int64_t count, int64_t dim, float *sums, int64_t sum_step, Coming &coming) {
    constexpr int kParts = kMostQueries > 3 ? 4 : 3; // registers of columns
    int64_t column = 0;
    for (; column + (kParts - 1) * kLanes < dim; column += kParts * kLanes)
        weigh_columns<Queries, kParts>(weights, weight_step, values + column, value_step, count, dim - column,
                                       sums + column, sum_step, coming);
    for (; column < dim; column += kLanes)
        weigh_columns<Queries, 1>(weights, weight_step, values + column, value_step, count, dim - column,
                                  sums + column, sum_step, coming);
}

} // namespace fkv
