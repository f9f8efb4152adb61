// Row attention in float32: scattered query rows, each with its own causal limit, one pass over the keys.
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
    int64_t batch, q_heads, kv_heads, rows, keys, dim;

    int64_t heads() const { return batch * kv_heads; }
    int64_t groups() const { return q_heads / kv_heads; }
    int64_t strips() const { return strips_of(rows * groups()); }
    int64_t strips_per_task(int64_t threads) const {
        const int64_t most = std::clamp<int64_t>(kTaskFloats / (2 * dim * kStrip), 1, kMostStrips);
        return std::clamp<int64_t>(heads() * strips() / (kTasksPerThread * threads), 1, most);
    }
    int64_t strip_floats() const { return Strip::floats(dim) + dim * kStrip; }
    int64_t thread_floats(int64_t threads) const {
        return kKeyBlock * kStrip + strips_per_task(threads) * strip_floats();
    }
};

// Keys and values of one head, [keys, dim] each by the step from row to row, and where its query heads' rows go.
struct Head {
    const float *keys, *values;
    int64_t key_step, value_step;
    float *out;
    int64_t out_head, out_row;
};

template <int Registers>
void attend(Strip &strip, float *sums, const Rows &rows, const Head &head, int64_t start, float *scores) {
    const int64_t width = std::min(kKeyBlock, strip.most - start);
    const Left keys{head.keys + start * head.key_step, head.key_step, 1};
    const Left values{head.values + start * head.value_step, 1, head.value_step};
    Lanes highest[Registers];
    float factor[kStrip];
    product<Registers>(width, keys, strip.queries, rows.dim, scores, nullptr);
    hide<Registers>(strip, start, width, scores, highest);
    weigh<Registers>(strip, width, scores, highest, factor);
    product<Registers>(rows.dim, values, scores, width, sums, factor);
}

void write(const Strip &strip, const float *sums, const Rows &rows, const Head &head) {
    for (int64_t row = 0; row < strip.count; ++row) {
        const int64_t folded = strip.first + row;
        float *target = head.out + folded % rows.groups * head.out_head + folded / rows.groups * head.out_row;
        const float share = 1.0f / strip.total[row];
        for (int64_t i = 0; i < rows.dim; ++i) target[i] = sums[i * strip.width() + row] * share;
    }
}

// Strips [first, last) of a head. `memory` holds the scores of a strip, then all strips' own, then their sums.
void run_task(const Rows &rows, const Head &head, int64_t first, int64_t last, float *memory) {
    Strip strips[kMostStrips];
    const int64_t count = last - first, sum_floats = rows.dim * kStrip;
    float *scores = memory, *own = scores + kKeyBlock * kStrip, *sums = own + count * Strip::floats(rows.dim);
    for (int64_t i = 0; i < count; ++i) strips[i].begin(rows, first + i, own + i * Strip::floats(rows.dim));
    std::fill(sums, sums + count * sum_floats, 0.0f);
    for (int64_t start = 0; start < strips[count - 1].most; start += kKeyBlock)
        for (int64_t i = 0; i < count; ++i)
            if (start < strips[i].most)
                with_registers(strips[i], [&](auto registers) {
                    attend<registers()>(strips[i], sums + i * sum_floats, rows, head, start, scores);
                });
    for (int64_t i = 0; i < count; ++i) write(strips[i], sums + i * sum_floats, rows, head);
}

Shape shaped(const int64_t *s) { return {s[0], s[1], s[2], s[3], s[4], s[5]}; }

} // namespace

extern "C" {

// Bytes of scratch that fkv_row_attention wants.
int64_t fkv_row_attention_scratch(const int64_t *shape, int threads) {
    return threads * shaped(shape).thread_floats(threads) * 4;
}

// q [B, Hq, R, D], k and v [B, Hkv, N, D] by strides (batch, head, row; elements; the last dimension is dense),
// positions int64 [R] ascending, out like q. Scores are multiplied by `scale`.
void fkv_row_attention(const float *q, const float *k, const float *v, float *out, const int64_t *positions,
                       float *scratch, const int64_t *shape, const int64_t *q_strides, const int64_t *k_strides,
                       const int64_t *v_strides, const int64_t *out_strides, float scale, int threads) {
    const Shape s = shaped(shape);
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
            const Rows rows{q + batch * q_strides[0] + q_head * q_strides[1], q_strides[1], q_strides[2], s.rows,
                            s.groups(), s.dim, positions, scale * 1.44269504088896340736f};
            run_task(rows,
                     {k + batch * k_strides[0] + head * k_strides[1], v + batch * v_strides[0] + head * v_strides[1],
                      k_strides[2], v_strides[2], out + batch * out_strides[0] + q_head * out_strides[1],
                      out_strides[1], out_strides[2]},
                     strips * block / blocks, strips * (block + 1) / blocks, memory);
        }
    }
}
}
