// Token scores in float32: the softmax mass that each key receives, without a matrix of all rows and keys.
#include "strips.h"

#include <vector>

namespace {

using namespace fkv;

// Adds to `mass` what each of the keys [0, strip.most) gets of the strip's rows, each row's share being `weight`.
template <int Registers>
void add_shares(Strip &strip, const Rows &rows, Left keys, float weight, float *scores, float *mass) {
    Lanes highest[Registers], share[Registers];
    product<Registers>(strip.most, keys, strip.queries, rows.dim, scores, nullptr);
    hide<Registers>(strip, 0, strip.most, scores, highest);
    weigh<Registers>(strip, strip.most, scores, highest, nullptr);
    for (int part = 0; part < Registers; ++part) {
        const Lanes there = load_floats(strip.total + part * kLanes);
        const Mask real = first_lanes(strip.count - part * kLanes);
        float shares[kLanes] = {};
        store_floats(shares, real, weight / there);
        share[part] = load_floats(shares);
    }
    for (int64_t key = 0; key < strip.most; ++key) {
        Lanes sum{};
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part)
            sum += load_floats(scores + (key * Registers + part) * kLanes) * share[part];
        mass[key] += sum_lanes(sum);
    }
}

} // namespace

extern "C" {

// q [Hq, R, D] and k [Hkv, N, D] by strides (head, row; elements), positions int64 [R] ascending; out float32 [N] gets
// the mean mass over rows and heads. The sum is formed in the same order whatever the number of threads.
void fkv_token_scores(const float *q, const float *k, const int64_t *positions, float *out, const int64_t *shape,
                      const int64_t *q_strides, const int64_t *k_strides, float scale, int threads) {
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
            const Rows folded{q + head * groups * q_strides[0], q_strides[0], q_strides[1], rows, groups, dim,
                              positions, scale * 1.44269504088896340736f};
            const Left head_keys{k + head * k_strides[0], k_strides[1], 1};
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
