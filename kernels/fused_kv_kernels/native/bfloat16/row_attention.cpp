// Row attention on AVX512-BF16, and AMX where there is one: scattered query rows, each with its own causal limit, one
// pass over the keys.
//
// The query heads that share a key head are folded into rows. Keys and values of a head are packed once. Each block of
// rows then processes the key blocks up to its last row with a running maximum and sum (online softmax), so the scores
// stay in the first-level cache and are not rounded to bfloat16 before the softmax.
#include "matrix_tiles.h"

#include <cmath>
#include <vector>

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = FKV_MATRIX_TILES ? 32 : 24; // four register tiles, or two matrix tiles
constexpr int64_t kKeyBlock = 256;

struct Shape {
    int64_t batch, q_heads, kv_heads, rows, keys, dim;
};

struct Workspace {
    std::vector<uint32_t> queries, weights;
    std::vector<float> scores, sums, highest, maximum, total, factor;
    std::vector<int64_t> limits;

    // Matrix products read whole tiles: unused rows stay zero.
    Workspace(int64_t dim, int64_t padded)
        : queries(kRowBlock * dim / 2), weights(kRowBlock * kKeyBlock / 2), scores(kRowBlock * kKeyBlock),
          sums(kRowBlock * padded), highest(2 * kLanes), maximum(2 * kLanes), total(kRowBlock * kLanes),
          factor(2 * kLanes), limits(kRowBlock) {}
};

inline void keep(uint16_t *target, __m512 weight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target), (__m256i)_mm512_cvtneps_pbh(weight));
}

// The highest score of one row over the first `limit` keys.
inline float highest_score(const float *scores, int64_t limit) {
    __m512 highest = _mm512_set1_ps(kMinusInfinity);
    int64_t column = 0;
    for (; column + kLanes <= limit; column += kLanes)
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + column));
    const __mmask16 rest = first_lanes(limit - column);
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

// Turns the scores of one row over the first `limit` of `width` keys into weights, and adds them up.
inline void weigh(Workspace &space, int64_t row, int64_t limit, int64_t width, float scale) {
    const float *scores = space.scores.data() + row * kKeyBlock;
    auto *weights = reinterpret_cast<uint16_t *>(space.weights.data()) + row * kKeyBlock;
    const __m512 scaled = _mm512_set1_ps(scale), shift = _mm512_set1_ps(space.maximum[row]);
    float *total = space.total.data() + row * kLanes;
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(total), _mm512_set1_ps(space.factor[row]));
    int64_t column = 0;
    for (; column + kLanes <= limit; column += kLanes) {
        const __m512 weight = exp2_register(_mm512_fmsub_ps(_mm512_loadu_ps(scores + column), scaled, shift));
        sum = _mm512_add_ps(sum, weight);
        keep(weights + column, weight);
    }
    const __mmask16 rest = first_lanes(limit - column);
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

} // namespace

extern "C" {

// Bytes of scratch that fkv_row_attention wants: the packed keys and values.
int64_t fkv_row_attention_scratch(const int64_t *shape, int) {
    const int64_t heads = shape[0] * shape[2], keys = shape[4], dim = shape[5];
    return heads * round_up(keys, kPanel) / 2 * (dim + round_up(dim, kLanes)) * 4;
}

// q [B, Hq, R, D], k and v [B, Hkv, N, D] by strides (batch, head, row; elements; the last dimension is dense),
// positions int64 [R] ascending, out like q. Scores are multiplied by `scale`.
void fkv_row_attention(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, const int64_t *positions,
                       uint32_t *scratch, const int64_t *shape, const int64_t *q_strides, const int64_t *k_strides,
                       const int64_t *v_strides, const int64_t *out_strides, float scale, int threads) {
    const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
    const int64_t groups = s.q_heads / s.kv_heads, folded = s.rows * groups, heads = s.batch * s.kv_heads;
    const int64_t padded = round_up(s.dim, kLanes), panels = round_up(s.keys, kPanel) / kPanel;
    const int64_t panel_words = kPanel * s.dim / 2, value_rows = panels * kPanel / 2;
    uint32_t *packed_keys = scratch, *packed_values = scratch + heads * panels * panel_words;
    const int64_t blocks = (folded + kRowBlock - 1) / kRowBlock;
    const float log2_scale = scale * 1.44269504088896340736f;

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < heads * panels; ++task) {
            const int64_t head = task / panels, first = task % panels * kPanel;
            const int64_t count = std::min<int64_t>(kPanel, s.keys - first);
            const uint16_t *keys = k + head / s.kv_heads * k_strides[0] + head % s.kv_heads * k_strides[1];
            const uint16_t *values = v + head / s.kv_heads * v_strides[0] + head % s.kv_heads * v_strides[1];
            pack_keys(keys + first * k_strides[2], k_strides[2], count, s.dim, packed_keys + task * panel_words);
            for (int64_t row = first; row < first + count; row += 2)
                pack_value_pair(values + row * v_strides[2],
                                row + 1 < s.keys ? values + (row + 1) * v_strides[2] : nullptr, s.dim, padded,
                                packed_values + (head * value_rows + row / 2) * padded);
            const int64_t pairs = (count + 1) / 2;
            std::memset(packed_values + (head * value_rows + first / 2 + pairs) * padded, 0,
                        (kPanel / 2 - pairs) * padded * 4);
        }
        Workspace space(s.dim, padded);
        int64_t seen[kRowBlock];
        const TileState tiles(s.dim % 32 == 0);
        // The last rows see most keys: they come first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < heads * blocks; ++task) {
            const int64_t block = blocks - 1 - task / heads, head = task % heads;
            const int64_t first = block * kRowBlock, count = std::min(kRowBlock, folded - first);
            const int64_t batch = head / s.kv_heads, kv_head = head % s.kv_heads;
            for (int64_t row = 0; row < count; ++row) {
                const int64_t at = (first + row) / groups, q_head = kv_head * groups + (first + row) % groups;
                std::memcpy(space.queries.data() + row * s.dim / 2,
                            q + batch * q_strides[0] + q_head * q_strides[1] + at * q_strides[2], s.dim * 2);
                space.limits[row] = positions[at] + 1;
                space.maximum[row] = kMinusInfinity;
            }
            std::fill(space.sums.begin(), space.sums.end(), 0.0f);
            std::fill(space.total.begin(), space.total.end(), 0.0f);
            const int64_t end = space.limits[count - 1];
            const uint32_t *head_keys = packed_keys + head * panels * panel_words;
            const uint32_t *head_values = packed_values + head * value_rows * padded;
            for (int64_t start = 0; start < end; start += kKeyBlock) {
                const int64_t width = std::min(kKeyBlock, end - start);
                for (int64_t at = 0; at < width; at += kPanel) {
                    const uint32_t *panel = head_keys + (start + at) / kPanel * panel_words;
                    if (tiles.active())
                        tile_product(space.queries.data(), s.dim / 2, panel, kPanel, s.dim / 2,
                                     space.scores.data() + at, kKeyBlock, nullptr, kPanel);
                    else
                        product(space.queries.data(), s.dim / 2, panel, kPanel, s.dim / 2, space.scores.data() + at,
                                kKeyBlock, nullptr, count, kPanel);
                }
                for (int64_t row = 0; row < count; ++row) {
                    seen[row] = std::clamp<int64_t>(space.limits[row] - start, 0, width);
                    space.highest[row] = highest_score(space.scores.data() + row * kKeyBlock, seen[row]);
                }
                rescale(space, count, log2_scale);
                for (int64_t row = 0; row < count; ++row) weigh(space, row, seen[row], width, log2_scale);
                const uint32_t *value_pairs = head_values + start / 2 * padded;
                if (tiles.active())
                    tile_product(space.weights.data(), kKeyBlock / 2, value_pairs, padded, round_up(width, 32) / 2,
                                 space.sums.data(), padded, space.factor.data(), padded);
                else
                    product(space.weights.data(), kKeyBlock / 2, value_pairs, padded, (width + 1) / 2,
                            space.sums.data(), padded, space.factor.data(), count, padded);
            }
            for (int64_t row = 0; row < count; ++row) {
                const int64_t at = (first + row) / groups, q_head = kv_head * groups + (first + row) % groups;
                uint16_t *target = out + batch * out_strides[0] + q_head * out_strides[1] + at * out_strides[2];
                const __m512 total = _mm512_loadu_ps(space.total.data() + row * kLanes);
                const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
                for (int64_t column = 0; column < s.dim; column += kLanes) {
                    const __m512 sum = _mm512_loadu_ps(space.sums.data() + row * padded + column);
                    _mm256_mask_storeu_epi16(target + column, first_lanes(s.dim - column),
                                             (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, share)));
                }
            }
        }
    }
}
}
