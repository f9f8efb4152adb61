// Row attention in float32: scattered query rows, each with its own causal limit and window, one pass over the keys.
//
// Keys and values are the left operands of the products and are read in place, without packing. A task processes
// several strips of rows together, one block of keys after another, with a running maximum and sum (online softmax). So
// a block of keys is read once for all of them, and the scores stay in the first-level cache.
#include "strips.h"

#include <omp.h>

namespace {

using namespace fkv;

constexpr int64_t kKeyBlock = 96;
constexpr int64_t kTaskFloats = 65536; // queries and sums of a task: a quarter MiB, for the second-level cache
constexpr int64_t kMostStrips = 16;
constexpr int64_t kTasksPerThread = 4; // so that the threads end together

struct Shape {
    int64_t batch, q_heads, kv_heads, rows, keys, dim, value_dim;

    int64_t heads() const { return batch * kv_heads; }
    int64_t groups() const { return q_heads / kv_heads; }
    int64_t strips() const { return strips_of(rows * groups()); }
    int64_t strips_per_task(int64_t threads) const {
        const int64_t most = std::clamp<int64_t>(kTaskFloats / ((dim + value_dim) * kStrip), 1, kMostStrips);
        return std::clamp<int64_t>(heads() * strips() / (kTasksPerThread * threads), 1, most);
    }
    int64_t strip_floats() const { return Strip::floats(dim) + value_dim * kStrip; }
    int64_t thread_floats(int64_t threads) const {
        return kKeyBlock * kStrip + strips_per_task(threads) * strip_floats();
    }
};

// Keys and values of one head, [keys, width] each by the step from row to row, and where its query heads' rows go.
struct Head {
    const float *keys, *values;
    int64_t key_step, value_step, value_dim;
    float *out;
    int64_t out_head, out_row;
};

template <int Registers>
void attend(Strip &strip, float *sums, const Rows &rows, const Head &head, int64_t block, float *scores) {
    // Blocks begin at the same keys for all strips: a row's result must not depend on the rows beside it.
    const int64_t start = std::max(block, strip.begin_key), width = std::min(block + kKeyBlock, strip.most) - start;
    const Left keys{head.keys + start * head.key_step, head.key_step, 1};
    const Left values{head.values + start * head.value_step, 1, head.value_step};
    Lanes highest[Registers];
    float factor[kStrip];
    product<Registers>(width, keys, strip.queries, rows.dim, scores, nullptr);
    if (rows.scoring.capped()) cap<Registers>(rows.scoring, width, scores);
    hide<Registers>(strip, start, width, scores, highest);
    weigh<Registers>(strip, width, scores, highest, factor);
    product<Registers>(head.value_dim, values, scores, width, sums, factor);
}

void write(const Strip &strip, const float *sums, const Rows &rows, const Head &head) {
    for (int64_t row = 0; row < strip.count; ++row) {
        const int64_t folded = strip.first + row;
        float *target = head.out + folded % rows.groups * head.out_head + folded / rows.groups * head.out_row;
        const float sink = rows.scoring.sink_weight(rows.q_head + folded % rows.groups, strip.highest[row]);
        const float share = 1.0f / (strip.total[row] + sink);
        for (int64_t i = 0; i < head.value_dim; ++i) target[i] = sums[i * strip.width() + row] * share;
    }
}

// Strips [first, last) of a head. `memory` holds the scores of a strip, then all strips' own, then their sums.
void run_task(const Rows &rows, const Head &head, int64_t first, int64_t last, float *memory) {
    Strip strips[kMostStrips];
    const int64_t count = last - first, sum_floats = head.value_dim * kStrip;
    float *scores = memory, *own = scores + kKeyBlock * kStrip, *sums = own + count * Strip::floats(rows.dim);
    for (int64_t i = 0; i < count; ++i) strips[i].begin(rows, first + i, own + i * Strip::floats(rows.dim));
    std::fill(sums, sums + count * sum_floats, 0.0f);
    const int64_t begin = strips[0].begin_key / kKeyBlock * kKeyBlock;
    for (int64_t start = begin; start < strips[count - 1].most; start += kKeyBlock)
        for (int64_t i = 0; i < count; ++i)
            if (start < strips[i].most && start + kKeyBlock > strips[i].begin_key)
                with_registers(strips[i], [&](auto registers) {
                    attend<registers()>(strips[i], sums + i * sum_floats, rows, head, start, scores);
                });
    for (int64_t i = 0; i < count; ++i) write(strips[i], sums + i * sum_floats, rows, head);
}

Shape shaped(const int64_t *s) { return {s[0], s[1], s[2], s[3], s[4], s[5], s[6]}; }

} // namespace

extern "C" {

// Bytes of scratch that fkv_row_attention wants.
int64_t fkv_row_attention_scratch(const int64_t *shape, int threads) {
    return threads * shaped(shape).thread_floats(threads) * 4;
}

// q [B, Hq, R, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] and out [B, Hq, R, Dv], each by three strides (batch, head, row;
// elements; the last dimension is dense). positions int64 [R], ascending; first_keys int64 [R], not descending, or none;
// sinks float32 [Hq], or none. Products are multiplied by `scale`; a softcap of zero is none.
void fkv_row_attention(const float *q, const float *k, const float *v, float *out, const int64_t *positions,
                       const int64_t *first_keys, const float *sinks, float *scratch, const int64_t *shape,
                       const int64_t *strides, float scale, float softcap, int threads) {
    const Shape s = shaped(shape);
    const int64_t *of_q = strides, *of_k = strides + 3, *of_v = strides + 6, *of_out = strides + 9;
    const int64_t strips = s.strips(), per_task = s.strips_per_task(threads);
    const int64_t blocks = (strips + per_task - 1) / per_task;

#pragma omp parallel num_threads(threads)
    {
        float *memory = scratch + omp_get_thread_num() * s.thread_floats(threads);
        // The last rows see most keys: they come first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.heads() * blocks; ++task) {
            const int64_t block = blocks - 1 - task / s.heads();
            const int64_t batch = task % s.heads() / s.kv_heads, head = task % s.heads() % s.kv_heads;
            const int64_t q_head = head * s.groups();
            const Rows rows{q + batch * of_q[0] + q_head * of_q[1], of_q[1], of_q[2], s.rows, s.groups(), s.dim, q_head,
                            {positions, first_keys, sinks, scale, softcap}};
            run_task(rows,
                     {k + batch * of_k[0] + head * of_k[1], v + batch * of_v[0] + head * of_v[1], of_k[2], of_v[2],
                      s.value_dim, out + batch * of_out[0] + q_head * of_out[1], of_out[1], of_out[2]},
                     strips * block / blocks, strips * (block + 1) / blocks, memory);
        }
    }
}
}
