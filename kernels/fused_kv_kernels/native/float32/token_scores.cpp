// Token scores in float32: the softmax mass that each key receives, without a matrix of all rows and keys.
#include "strips.h"

#include <vector>

namespace {

using namespace fkv;

// Adds to `mass` what each of the keys [begin_key, most) gets of the strip's rows, each row's share being `weight`.
template <int Registers>
void add_shares(Strip &strip, const Rows &rows, Left keys, float weight, float *scores, float *mass) {
    const int64_t begin = strip.begin_key, width = strip.most - begin;
    Lanes highest[Registers], share[Registers];
    product<Registers>(width, keys.after(begin), strip.queries, rows.dim, scores, nullptr);
    if (rows.scoring.capped()) cap<Registers>(rows.scoring, width, scores);
    hide<Registers>(strip, begin, width, scores, highest);
    weigh<Registers>(strip, width, scores, highest, nullptr);
    float shares[Registers * kLanes] = {};
    for (int64_t row = 0; row < strip.count; ++row) {
        const int64_t q_head = rows.q_head + (strip.first + row) % rows.groups;
        shares[row] = weight / (strip.total[row] + rows.scoring.sink_weight(q_head, strip.highest[row]));
    }
    for (int part = 0; part < Registers; ++part) share[part] = load_floats(shares + part * kLanes);
    for (int64_t key = 0; key < width; ++key) {
        Lanes sum{};
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            sum = multiply_add(load_floats(scores + (key * Registers + part) * kLanes), share[part], sum);
        mass[begin + key] += sum_lanes(sum);
    }
}

} // namespace

extern "C" {

// q [Hq, R, D] and k [Hkv, N, D], each by two strides (head, row; elements), positions int64 [R] ascending, first_keys
// int64 [R] not descending, or none, sinks float32 [Hq], or none; a softcap of zero is none. out float32 [N] gets the
// mean mass over rows and heads. The sum is formed in the same order whatever the number of threads.
void fkv_token_scores(const float *q, const float *k, const int64_t *positions, const int64_t *first_keys,
                      const float *sinks, float *out, const int64_t *shape, const int64_t *strides, float scale,
                      float softcap, int threads) {
    const int64_t q_heads = shape[0], kv_heads = shape[1], rows = shape[2], keys = shape[3], dim = shape[4];
    const int64_t groups = q_heads / kv_heads, strips = strips_of(rows * groups);
    const float weight = 1.0f / static_cast<float>(q_heads * rows);
    std::vector<float> mass(kv_heads * strips * keys, 0.0f);

#pragma omp parallel num_threads(threads)
    {
        std::vector<float> own(Strip::floats(dim)), scores(keys * kStrip);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < kv_heads * strips; ++task) {
            const int64_t head = task % kv_heads;
            const Rows folded{q + head * groups * strides[0], strides[0], strides[1], rows, groups, dim, head * groups,
                              {positions, first_keys, sinks, scale, softcap}};
            const Left head_keys{k + head * strides[2], strides[3], 1};
            Strip strip;
            strip.begin(folded, task / kv_heads, own.data());
            with_registers(strip, [&](auto registers) {
                add_shares<registers()>(strip, folded, head_keys, weight, scores.data(), mass.data() + task * keys);
            });
        }
#pragma omp for schedule(static)
        for (int64_t column = 0; column < keys; ++column) {
            float total = 0.0f;
            for (int64_t task = 0; task < kv_heads * strips; ++task) total += mass[task * keys + column];
            out[column] = total;
        }
    }
}
}
