// Token scores on AVX512-BF16: the softmax mass that each key receives, without a matrix of all rows and keys.
#include "row_softmax.h"

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = 24;

// Turns the scores of one row over the keys it sees into their share of the softmax; adds them to `mass`.
void add_shares(float *scores, Seen seen, float scale, float weight, const Scoring &scoring, int64_t head,
                float *mass) {
    const __m512 scaled = _mm512_set1_ps(scale);
    const float highest = highest_score<true>(scores, seen) * scale;
    const __m512 shift = _mm512_set1_ps(highest);
    __m512 sum = _mm512_setzero_ps();
    Mask begun = static_cast<Mask>(~first_lanes(seen.from - seen.register_start())); // in all but the first register
    for (int64_t column = seen.register_start(); column < seen.limit; column += kLanes, begun = 0xffff) {
        const __m512 value = exp2_register(_mm512_fmsub_ps(_mm512_loadu_ps(scores + column), scaled, shift));
        const __m512 there = _mm512_maskz_mov_ps(begun & first_lanes(seen.limit - column), value);
        _mm512_storeu_ps(scores + column, there);
        sum = _mm512_add_ps(sum, there);
    }
    const float total = _mm512_reduce_add_ps(sum) + scoring.sink_weight(head, highest);
    const __m512 share = _mm512_set1_ps(weight / total);
    for (int64_t column = seen.register_start(); column < seen.limit; column += kLanes)
        _mm512_storeu_ps(mass + column, _mm512_fmadd_ps(_mm512_loadu_ps(scores + column), share,
                                                        _mm512_loadu_ps(mass + column)));
}

} // namespace

extern "C" {

// q [Hq, R, D] and k [Hkv, N, D], each by two strides (head, row; elements), positions int64 [R] ascending, first_keys
// int64 [R] not descending, or none, sinks float32 [Hq], or none; a softcap of zero is none. out float32 [N] gets the
// mean mass over rows and heads. The sum is formed in the same order whatever the number of threads.
void fkv_token_scores(const uint16_t *q, const uint16_t *k, const int64_t *positions, const int64_t *first_keys,
                      const float *sinks, float *out, const int64_t *shape, const int64_t *strides, float scale,
                      float softcap, int threads) {
    const Scoring scoring{positions, first_keys, sinks, scale, softcap};
    const int64_t q_heads = shape[0], kv_heads = shape[1], rows = shape[2], keys = shape[3], dim = shape[4];
    const int64_t groups = q_heads / kv_heads, folded = rows * groups;
    const int64_t panels = round_up(keys, kPanel) / kPanel, panel_words = kPanel * dim / 2, width = panels * kPanel;
    const int64_t blocks = (folded + kRowBlock - 1) / kRowBlock, unseen = scoring.first(0) / kPanel;
    std::vector<uint32_t> packed(kv_heads * panels * panel_words);
    std::vector<float> mass(kv_heads * blocks * width, 0.0f);
    const float weight = 1.0f / static_cast<float>(q_heads * rows);

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < kv_heads * (panels - unseen); ++task) {
            const int64_t head = task / (panels - unseen), panel = unseen + task % (panels - unseen);
            const int64_t first = panel * kPanel;
            pack_keys(k + head * strides[2] + first * strides[3], strides[3], std::min<int64_t>(kPanel, keys - first),
                      dim, packed.data() + (head * panels + panel) * panel_words);
        }
        std::vector<uint32_t> queries(kRowBlock * dim / 2);
        std::vector<float> scores(kRowBlock * width);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < kv_heads * blocks; ++task) {
            const int64_t head = task % kv_heads, first = task / kv_heads * kRowBlock;
            const int64_t count = std::min(kRowBlock, folded - first);
            for (int64_t row = 0; row < count; ++row)
                std::memcpy(queries.data() + row * dim / 2,
                            q + (head * groups + (first + row) % groups) * strides[0] +
                                (first + row) / groups * strides[1],
                            dim * 2);
            const int64_t begin = scoring.first(first / groups) / kPanel * kPanel;
            const int64_t end = scoring.limit((first + count - 1) / groups);
            for (int64_t start = begin; start < end; start += kPanel)
                product(queries.data(), dim / 2, packed.data() + (head * panels + start / kPanel) * panel_words, kPanel,
                        dim / 2, scores.data() + start, width, nullptr, count, kPanel);
            if (scoring.capped()) cap_scores(scores.data() + begin, count, width, end - begin, scoring.before_cap());
            for (int64_t row = 0; row < count; ++row) {
                const int64_t at = (first + row) / groups, q_head = head * groups + (first + row) % groups;
                add_shares(scores.data() + row * width, {scoring.first(at), scoring.limit(at)}, scoring.after_cap(),
                           weight, scoring, q_head, mass.data() + task * width);
            }
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
