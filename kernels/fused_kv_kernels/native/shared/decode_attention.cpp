// Attention of one new token a sequence, each with a cache of its own: what decoding does, bound by reading the caches.
//
// A sequence's keys are cut into spans at multiples of kSpan. Each span of each key head is a task, which any thread may
// take; it leaves a highest score, a sum of weights and the weighted values of every query head, which are put together
// in the order of the spans. So a row's result depends neither on the other rows nor on the number of threads.
#include "decode_products.h"
#include "scoring.h"

#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using namespace fkv;

constexpr int64_t kSpan = 128; // keys of a task

// Keys and values of one sequence, elements from layer to layer and head to head in each, and where its token goes.
struct Cache {
    Element *keys, *values;
    int64_t key_layer, key_head, value_layer, value_head, position;
};

struct Shape {
    int64_t q_heads, kv_heads, rows, dim, value_dim, groups, padded_dim, padded_value_dim;

    explicit Shape(const int64_t *s)
        : q_heads(s[0]), kv_heads(s[1]), rows(s[2]), dim(s[3]), value_dim(s[4]), groups(q_heads / kv_heads),
          padded_dim(round_up(dim, kStep)), padded_value_dim(round_up(value_dim, kColumns)) {}
};

// The new tokens' queries, keys and values, by two strides each (head, row); out is [rows, q_heads, value_dim].
struct Rows {
    const Element *q, *k, *v;
    Element *out;
    const int64_t *strides;
};

// What the spans of a sequence leave, query head by query head: [q_heads][spans].
struct Partials {
    float *highest, *totals, *sums;

    Partials(float *memory, int64_t count) : highest(memory), totals(memory + count), sums(memory + 2 * count) {}
    static int64_t floats(int64_t count, const Shape &s) { return count * (2 + s.padded_value_dim); }
};

// One sequence in one layer. Its spans are numbered from `before` on among those of all sequences.
struct Sequence {
    Cache cache;
    int64_t first, limit, first_span, spans, before;

    Sequence(const Cache &of, int64_t layer, int64_t first_key, int64_t spans_before) : cache(of) {
        cache.keys += layer * cache.key_layer;
        cache.values += layer * cache.value_layer;
        first = first_key;
        limit = cache.position + 1;
        first_span = first / kSpan;
        spans = cache.position / kSpan - first_span + 1;
        before = spans_before;
    }
    // Where partials of a query head's first span are.
    int64_t partial(const Shape &s, int64_t q_head) const { return before * s.q_heads + q_head * spans; }
};

// A thread's own: the queries of a key head, and their scores and weights over a span.
struct Workspace {
    std::vector<Element> queries, weights;
    std::vector<float> scores;

    explicit Workspace(const Shape &s)
        : queries(s.groups * s.padded_dim), weights(s.groups * kSpan), scores(s.groups * kSpan) {}
};

// Calls function(first query, number of them as a constant) for groups of queries, none larger than kMostQueries.
template <int Queries = kMostQueries, typename Function>
inline void in_groups(int64_t first, int64_t queries, const Function &function) {
    if constexpr (Queries > 0) {
        for (; queries >= Queries; first += Queries, queries -= Queries)
            function(first, std::integral_constant<int, Queries>{});
        in_groups<Queries - 1>(first, queries, function);
    }
}

void score(const Shape &s, const Element *keys, int64_t count, Workspace &space, Coming coming) {
    for (int64_t at = 0; at < count; at += 4) {
        coming.fetch();
        const Element *four[4]; // behind the last key stands that key again, whose scores are left out below
        for (int64_t key = 0; key < 4; ++key) four[key] = keys + std::min(at + key, count - 1) * s.dim;
        in_groups(0, s.groups, [&](int64_t query, auto queries) {
            score_four<queries()>(space.queries.data() + query * s.padded_dim, s.padded_dim, four, s.dim,
                                  space.scores.data() + query * kSpan + at, kSpan);
        });
    }
}

// Turns the scores of one query into weights relative to the highest, and returns that and their sum.
std::pair<float, float> weigh(const Scoring &scoring, float *scores, int64_t count, Element *weights) {
    Lanes highest = splat(kMinusInfinity);
    for (int64_t at = 0; at < count; at += kLanes) {
        Lanes score = load_floats(scores + at);
        score = scoring.capped() ? tanh_lanes(score * scoring.before_cap()) * scoring.after_cap()
                                 : score * scoring.after_cap();
        for (int64_t lane = count - at; lane < kLanes; ++lane) score[lane] = kMinusInfinity;
        store_floats(scores + at, score);
        highest = larger(score, highest);
    }
    float most = kMinusInfinity;
    for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
    const Lanes base = splat(most > kMinusInfinity ? most : 0.0f);
    Lanes total{};
    for (int64_t at = 0; at < count; at += kLanes) {
        const Lanes weight = exp2_lanes(load_floats(scores + at) - base);
        total += weight;
        store(weights + at, first_lanes(kLanes), weight);
    }
    return {most, sum_lanes(total)};
}

// One span of one key head of a sequence.
struct Task {
    const Sequence *of;
    int64_t row, span, head, begin, end;

    Task(const Shape &s, const std::vector<Sequence> &sequences, int64_t row, int64_t number)
        : of(&sequences[row]), row(row), span(number % of->spans), head(number / of->spans),
          begin(std::max(of->first, (of->first_span + span) * kSpan)),
          end(std::min(of->limit, (of->first_span + span + 1) * kSpan)) {}
    int64_t count() const { return end - begin; }
    Element *keys(const Shape &s) const { return of->cache.keys + head * of->cache.key_head + begin * s.dim; }
    Element *values(const Shape &s) const {
        return of->cache.values + head * of->cache.value_head + begin * s.value_dim;
    }
};

void run_task(const Shape &s, const Rows &rows, const Scoring &scoring, const Task &task, const Task *next,
              const Partials &partials, Workspace &space) {
    Element *const keys = task.keys(s), *const values = task.values(s);
    const int64_t count = task.count(), q_head = task.head * s.groups, last = count - 1;
    if (task.end == task.of->limit) {
        std::memcpy(keys + last * s.dim, rows.k + task.head * rows.strides[2] + task.row * rows.strides[3],
                    s.dim * sizeof *keys);
        std::memcpy(values + last * s.value_dim, rows.v + task.head * rows.strides[4] + task.row * rows.strides[5],
                    s.value_dim * sizeof *values);
    }
    for (int64_t query = 0; query < s.groups; ++query)
        std::memcpy(space.queries.data() + query * s.padded_dim,
                    rows.q + (q_head + query) * rows.strides[0] + task.row * rows.strides[1], s.dim * sizeof *keys);
    const int64_t calls = (count + 3) / 4;
    score(s, keys, count, space, {values, count * s.value_dim * int64_t(sizeof *values), calls});
    for (int64_t query = 0; query < s.groups; ++query) {
        const int64_t at = task.of->partial(s, q_head + query) + task.span;
        std::tie(partials.highest[at], partials.totals[at]) =
            weigh(scoring, space.scores.data() + query * kSpan, count, space.weights.data() + query * kSpan);
    }
    Coming coming;
    if (next) coming = {next->keys(s), next->count() * s.dim * int64_t(sizeof *keys), calls};
    in_groups(0, s.groups, [&](int64_t query, auto queries) {
        float *const sums = partials.sums + (task.of->partial(s, q_head + query) + task.span) * s.padded_value_dim;
        weigh_values<queries()>(space.weights.data() + query * kSpan, kSpan, values, s.value_dim, count, s.value_dim,
                                sums, task.of->spans * s.padded_value_dim, coming);
    });
}

// Puts the spans of one query head of a sequence together.
void combine(const Shape &s, const Scoring &scoring, const Sequence &of, int64_t q_head, const Partials &partials,
             Element *out) {
    const int64_t from = of.partial(s, q_head);
    float *const highest = partials.highest + from;
    const float most = *std::max_element(highest, highest + of.spans);
    float total = scoring.sink_weight(q_head, most);
    for (int64_t span = 0; span < of.spans; ++span) {
        highest[span] = std::exp2(highest[span] - most); // now the factor of what is relative to it
        total += partials.totals[from + span] * highest[span];
    }
    const float share = 1.0f / total;
    for (int64_t column = 0; column < s.value_dim; column += kLanes) {
        const Mask here = first_lanes(s.value_dim - column);
        Lanes sum{};
        for (int64_t span = 0; span < of.spans; ++span)
            sum += load_floats(partials.sums + (from + span) * s.padded_value_dim + column, here) * highest[span];
        store(out + column, here, sum * share);
    }
}

} // namespace

extern "C" {

// Bytes of scratch that fkv_decode_attention wants.
int64_t fkv_decode_attention_scratch(const int64_t *caches, const int64_t *shape) {
    const Shape s(shape);
    int64_t spans = 0;
    for (int64_t row = 0; row < s.rows; ++row) {
        Cache cache;
        std::memcpy(&cache, caches + row * 7, sizeof cache);
        spans += cache.position / kSpan + 1;
    }
    return Partials::floats(spans * s.q_heads, s) * 4;
}

// q [Hq, R, D], k [Hkv, R, D] and v [Hkv, R, Dv] of the new tokens, each by two strides (head, row; elements; the last
// dimension is dense); out [R, Hq, Dv], dense. A cache is seven numbers: addresses of its keys and of its values,
// elements from layer to layer and from head to head in keys and in values, and the row that the token is written to
// and up to which it sees keys; rows are dense. first_keys int64 [R]: the first that a row sees, or none. sinks float32
// [Hq], or none. Products are multiplied by `scale`; a softcap of zero is none.
void fkv_decode_attention(const Element *q, const Element *k, const Element *v, Element *out, const int64_t *caches,
                          int64_t layer, const int64_t *first_keys, const float *sinks, float *scratch,
                          const int64_t *shape, const int64_t *strides, float scale, float softcap, int threads) {
    const Shape s(shape);
    const Rows rows{q, k, v, out, strides};
    const Scoring scoring{nullptr, nullptr, sinks, scale, softcap};
    std::vector<Sequence> sequences;
    sequences.reserve(s.rows);
    std::vector<int64_t> tasks(1, 0); // of the sequences up to each
    for (int64_t row = 0; row < s.rows; ++row) {
        Cache cache;
        std::memcpy(&cache, caches + row * 7, sizeof cache);
        sequences.emplace_back(cache, layer, first_keys ? first_keys[row] : 0, tasks.back() / s.kv_heads);
        tasks.push_back(tasks.back() + sequences.back().spans * s.kv_heads);
    }
    std::atomic<int64_t> taken(0);
    const Partials partials(scratch, tasks.back() / s.kv_heads * s.q_heads);

#pragma omp parallel num_threads(threads)
    {
        Workspace space(s);
        const auto next = [&]() -> std::optional<Task> {
            const int64_t number = taken++;
            if (number >= tasks.back()) return {};
            const int64_t row = std::upper_bound(tasks.begin(), tasks.end(), number) - tasks.begin() - 1;
            return Task(s, sequences, row, number - tasks[row]);
        };
        for (std::optional<Task> task = next(); task;) {
            const std::optional<Task> coming = next();
            run_task(s, rows, scoring, *task, coming ? &*coming : nullptr, partials, space);
            task = coming;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t at = 0; at < s.rows * s.q_heads; ++at)
            combine(s, scoring, sequences[at / s.q_heads], at % s.q_heads, partials, out + at * s.value_dim);
    }
}
}
