// The running softmax of a block of rows: from scores in float32 to weights in bfloat16.
#pragma once

#include "scoring.h"
#include "tiles.h"

#include <vector>

namespace fkv {

constexpr int64_t kKeyBlock = 256;

// Of the keys of a block, a row sees [from, limit).
struct Seen {
    int64_t from, limit;

    // Whether the first register of those has lanes before them, and which lanes are seen.
    int64_t register_start() const { return from / kLanes * kLanes; }
    Mask lanes(int64_t column) const {
        return static_cast<Mask>(first_lanes(limit - column) & ~first_lanes(from - column));
    }
};

struct Workspace {
    std::vector<uint32_t> queries, weights;
    std::vector<float> scores, sums, highest, maximum, total, factor;
    std::vector<int64_t> firsts, limits;

    // Matrix products read whole tiles: unused rows stay zero.
    Workspace(int64_t rows, int64_t dim, int64_t padded)
        : queries(rows * dim / 2), weights(rows * kKeyBlock / 2), scores(rows * kKeyBlock), sums(rows * padded),
          highest(2 * kLanes), maximum(2 * kLanes), total(rows * kLanes), factor(2 * kLanes), firsts(rows),
          limits(rows) {}
};

inline void keep(uint16_t *target, __m512 weight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target), (__m256i)_mm512_cvtneps_pbh(weight));
}

// Caps the scores of some rows over `width` keys, before their last factor.
inline void cap_scores(float *scores, int64_t rows, int64_t stride, int64_t width, float factor) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < width; column += kLanes) {
            float *at = scores + row * stride + column;
            store_floats(at, tanh_lanes(load_floats(at) * factor));
        }
}

// The highest score of one row over the keys it sees: all before its limit, unless there are windows.
template <bool Windows> inline float highest_score(const float *scores, Seen seen) {
    __m512 highest = _mm512_set1_ps(kMinusInfinity);
    int64_t column = 0;
    if constexpr (Windows) {
        column = seen.register_start();
        // A window that begins behind the block has no first register in it.
        if (column < seen.limit) {
            highest = _mm512_mask_max_ps(highest, seen.lanes(column), highest, _mm512_loadu_ps(scores + column));
            column += kLanes;
        }
    }
    for (; column + kLanes <= seen.limit; column += kLanes)
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + column));
    const __mmask16 rest = first_lanes(seen.limit - column);
    if (rest) highest = _mm512_mask_max_ps(highest, rest, highest, _mm512_loadu_ps(scores + column));
    return _mm512_reduce_max_ps(highest);
}

// Updates the running maximum of all rows, and what their sums so far have to be multiplied by.
inline void rescale(Workspace &space, int64_t count, float scale) {
    for (int64_t row = 0; row < count; row += kLanes) {
        const __m512 before = _mm512_loadu_ps(space.maximum.data() + row);
        const __m512 found = _mm512_mul_ps(_mm512_loadu_ps(space.highest.data() + row), _mm512_set1_ps(scale));
        const __m512 after = _mm512_max_ps(before, found);
        const __mmask16 same = _mm512_cmp_ps_mask(before, after, _CMP_EQ_OQ);
        // Of a row without keys so far the difference is not a number: the second operand is taken.
        const __m512 power = _mm512_max_ps(_mm512_sub_ps(before, after), _mm512_set1_ps(-200.0f));
        const __m512 factor = _mm512_mask_mov_ps(exp2_register(power), same, _mm512_set1_ps(1.0f));
        _mm512_storeu_ps(space.factor.data() + row, factor);
        _mm512_storeu_ps(space.maximum.data() + row, after);
    }
}

// Turns the scores of one row over the keys it sees into weights, zero elsewhere, and adds them up.
template <bool Windows> inline void weigh(Workspace &space, int64_t row, Seen seen, float scale) {
    const float *scores = space.scores.data() + row * kKeyBlock;
    auto *weights = reinterpret_cast<uint16_t *>(space.weights.data()) + row * kKeyBlock;
    const __m512 scaled = _mm512_set1_ps(scale), shift = _mm512_set1_ps(space.maximum[row]);
    float *total = space.total.data() + row * kLanes;
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(total), _mm512_set1_ps(space.factor[row]));
    int64_t column = 0;
    if constexpr (Windows) {
        for (; column < seen.register_start(); column += kLanes) keep(weights + column, _mm512_setzero_ps());
        if (column < seen.limit) {
            const __m512 score = _mm512_maskz_loadu_ps(seen.lanes(column), scores + column);
            const __m512 power = exp2_register(_mm512_fmsub_ps(score, scaled, shift));
            const __m512 weight = _mm512_maskz_mov_ps(seen.lanes(column), power);
            sum = _mm512_add_ps(sum, weight);
            keep(weights + column, weight);
            column += kLanes;
        }
    }
    for (; column + kLanes <= seen.limit; column += kLanes) {
        const __m512 weight = exp2_register(_mm512_fmsub_ps(_mm512_loadu_ps(scores + column), scaled, shift));
        sum = _mm512_add_ps(sum, weight);
        keep(weights + column, weight);
    }
    const __mmask16 rest = first_lanes(seen.limit - column);
    if (rest) {
        const __m512 score = _mm512_maskz_loadu_ps(rest, scores + column);
        const __m512 weight = _mm512_maskz_mov_ps(rest, exp2_register(_mm512_fmsub_ps(score, scaled, shift)));
        sum = _mm512_add_ps(sum, weight);
        keep(weights + column, weight);
        column += kLanes;
    }
    _mm512_storeu_ps(total, sum);
    for (; column < kKeyBlock; column += kLanes) keep(weights + column, _mm512_setzero_ps());
}

} // namespace fkv
