// Token scores on AVX512-BF16: the softmax mass that each key receives, without a matrix of all rows and keys.
#include "tiles.h"

#include <vector>

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = 24;

// Turns the scores of one row, of which it sees `limit`, into their share of the softmax; adds them to `mass`.
void add_shares(float *scores, int64_t limit, float scale, float weight, float *mass) {
    const __m512 scaled = _mm512_set1_ps(scale);
    __m512 highest = _mm512_set1_ps(kMinusInfinity);
    for (int64_t column = 0; column < limit; column += kLanes)
        highest = _mm512_mask_max_ps(highest, first_lanes(limit - column), highest,
                                     _mm512_mul_ps(_mm512_loadu_ps(scores + column), scaled));
    const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t column = 0; column < limit; column += kLanes) {
        const __m512 value = exp2_register(_mm512_fmsub_ps(_mm512_loadu_ps(scores + column), scaled, shift));
        const __m512 seen = _mm512_maskz_mov_ps(first_lanes(limit - column), value);
        _mm512_storeu_ps(scores + column, seen);
        sum = _mm512_add_ps(sum, seen);
    }
    const __m512 share = _mm512_set1_ps(weight / _mm512_reduce_add_ps(sum));
    for (int64_t column = 0; column < limit; column += kLanes)
        _mm512_storeu_ps(mass + column, _mm512_fmadd_ps(_mm512_loadu_ps(scores + column), share,
                                                        _mm512_loadu_ps(mass + column)));
}

} // namespace

extern "C" {

// q [Hq, R, D] and k [Hkv, N, D] by strides (head, row; elements), positions int64 [R] ascending; out float32 [N] gets
// the mean mass over rows and heads. The sum is formed in the same order whatever the number of threads.
void fkv_token_scores(const uint16_t *q, const uint16_t *k, const int64_t *positions, float *out, const int64_t *shape,
                      const int64_t *q_strides, const int64_t *k_strides, float scale, int threads) {
    const int64_t q_heads = shape[0], kv_heads = shape[1], rows = shape[2], keys = shape[3], dim = shape[4];
    const int64_t groups = q_heads / kv_heads, folded = rows * groups;
    const int64_t panels = round_up(keys, kPanel) / kPanel, panel_words = kPanel * dim / 2, width = panels * kPanel;
    const int64_t blocks = (folded + kRowBlock - 1) / kRowBlock;
    std::vector<uint32_t> packed(kv_heads * panels * panel_words);
    std::vector<float> mass(kv_heads * blocks * width, 0.0f);
    const float weight = 1.0f / static_cast<float>(q_heads * rows);

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < kv_heads * panels; ++task) {
            const int64_t first = task % panels * kPanel;
            pack_keys(k + task / panels * k_strides[0] + first * k_strides[1], k_strides[1],
                      std::min<int64_t>(kPanel, keys - first), dim, packed.data() + task * panel_words);
        }
        std::vector<uint32_t> queries(kRowBlock * dim / 2);
        std::vector<float> scores(kRowBlock * width);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < kv_heads * blocks; ++task) {
            const int64_t head = task % kv_heads, first = task / kv_heads * kRowBlock;
            const int64_t count = std::min(kRowBlock, folded - first);
            for (int64_t row = 0; row < count; ++row)
                std::memcpy(queries.data() + row * dim / 2,
                            q + (head * groups + (first + row) % groups) * q_strides[0] +
                                (first + row) / groups * q_strides[1],
                            dim * 2);
            const int64_t end = positions[(first + count - 1) / groups] + 1;
            for (int64_t start = 0; start < end; start += kPanel)
                product(queries.data(), dim / 2, packed.data() + (head * panels + start / kPanel) * panel_words, kPanel,
                        dim / 2, scores.data() + start, width, nullptr, count, kPanel);
            for (int64_t row = 0; row < count; ++row)
                add_shares(scores.data() + row * width, positions[(first + row) / groups] + 1,
                           scale * 1.44269504088896340736f, weight, mass.data() + task * width);
        }
#pragma omp for schedule(static)
        for (int64_t column = 0; column < keys; ++column) {
            float total = 0.0f;
            for (int64_t task = 0; task < kv_heads * blocks; ++task) total += mass[task * width + column];
            out[column] = total;
        }
    }
}
}
