// Attention over spans of keys, whose results are put together afterwards: what the operators of decoding share.
#pragma once

#include "decode_products.h"
#include "scoring.h"

#include <atomic>
#include <tuple>
#include <utility>
#include <vector>

namespace fkv {

constexpr int64_t kSpan = 128; // keys of a sequence's own cache that are a task

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

    const Element *query(int64_t head, int64_t row) const { return q + head * strides[0] + row * strides[1]; }
    const Element *key(int64_t head, int64_t row) const { return k + head * strides[2] + row * strides[3]; }
    const Element *value(int64_t head, int64_t row) const { return v + head * strides[4] + row * strides[5]; }
};

// Keys and values of one sequence, elements from layer to layer and head to head in each, and the row that its new
// token is written to. Rows are dense.
struct Cache {
    Element *keys, *values;
    int64_t key_layer, key_head, value_layer, value_head, position;

    static constexpr int64_t kNumbers = 7;
    static Cache at(const int64_t *caches, int64_t row) {
        Cache cache;
        std::memcpy(&cache, caches + row * kNumbers, sizeof cache);
        return cache;
    }
    Element *key(const Shape &s, int64_t layer, int64_t head, int64_t row) const {
        return keys + layer * key_layer + head * key_head + row * s.dim;
    }
    Element *value(const Shape &s, int64_t layer, int64_t head, int64_t row) const {
        return values + layer * value_layer + head * value_head + row * s.value_dim;
    }
    void write(const Shape &s, const Rows &rows, int64_t layer, int64_t head, int64_t row) const {
        std::memcpy(key(s, layer, head, position), rows.key(head, row), s.dim * sizeof(Element));
        std::memcpy(value(s, layer, head, position), rows.value(head, row), s.value_dim * sizeof(Element));
    }
};

// What spans leave, one number or `padded_value_dim` sums each: the highest score, the sum of weights relative to it,
// and the weighted values.
struct Partials {
    float *highest, *totals, *sums;

    Partials(float *memory, int64_t count) : highest(memory), totals(memory + count), sums(memory + 2 * count) {}
    static int64_t nbytes(int64_t count, const Shape &s) { return count * (2 + s.padded_value_dim) * 4; }
};

// Where a sequence's spans are among those of all sequences: [q_heads][count], after `before` of other sequences.
struct Spans {
    int64_t before, count;

    int64_t partial(const Shape &s, int64_t q_head) const { return before * s.q_heads + q_head * count; }
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

// scores [queries][score_step] of `count` keys, whose parts are [count, dim] each. `coming` is fetched meanwhile.
template <int Parts>
inline void score(const Shape &s, const Element *queries, int64_t query_count, const Element *const (&parts)[Parts],
                  int64_t count, float *scores, int64_t score_step, Coming coming) {
    const int64_t query_step = Parts * s.padded_dim;
    for (int64_t at = 0; at < count; at += 4) {
        coming.fetch();
        const Element *four[Parts][4]; // behind the last key stands that key again, whose scores nobody looks at
#pragma GCC unroll 3
        for (int part = 0; part < Parts; ++part)
#pragma GCC unroll 4
            for (int64_t key = 0; key < 4; ++key) four[part][key] = parts[part] + std::min(at + key, count - 1) * s.dim;
        in_groups(0, query_count, [&](int64_t query, auto number) {
            score_four<number(), Parts>(queries + query * query_step, query_step, four, s.dim,
                                        scores + query * score_step + at, score_step);
        });
    }
}

// Turns the products of one query, which fill whole registers, into scores. Behind the last there are none.
inline void scale_scores(const Scoring &scoring, float *scores, int64_t count) {
    for (int64_t at = 0; at < count; at += kLanes) {
        Lanes score = load_floats(scores + at);
        score = scoring.capped() ? tanh_lanes(score * scoring.before_cap()) * scoring.after_cap()
                                 : score * scoring.after_cap();
        for (int64_t lane = count - at; lane < kLanes; ++lane) score[lane] = kMinusInfinity;
        store_floats(scores + at, score);
    }
}

// Turns the scores of one query into weights relative to the highest, and returns that and their sum.
inline std::pair<float, float> weigh(float *scores, int64_t count, Element *weights) {
    Lanes highest = splat(kMinusInfinity);
    for (int64_t at = 0; at < count; at += kLanes) highest = larger(load_floats(scores + at), highest);
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

// Puts the spans of one query head of a sequence together.
inline void combine(const Shape &s, const Scoring &scoring, const Spans &spans, int64_t q_head,
                    const Partials &partials, Element *out) {
    const int64_t from = spans.partial(s, q_head);
    float *const highest = partials.highest + from;
    const float most = *std::max_element(highest, highest + spans.count);
    float total = scoring.sink_weight(q_head, most);
    for (int64_t span = 0; span < spans.count; ++span) {
        highest[span] = std::exp2(highest[span] - most); // now the factor of what is relative to it
        total += partials.totals[from + span] * highest[span];
    }
    const float share = 1.0f / total;
    for (int64_t column = 0; column < s.value_dim; column += kLanes) {
        const Mask here = first_lanes(s.value_dim - column);
        Lanes sum{};
        for (int64_t span = 0; span < spans.count; ++span)
            sum += load_floats(partials.sums + (from + span) * s.padded_value_dim + column, here) * highest[span];
        store(out + column, here, sum * share);
    }
}

// One span of one key head of a sequence's own cache: its keys [begin, end).
struct OwnSpan {
    Cache cache;
    Spans spans;
    int64_t row, span, head, begin, end;

    int64_t count() const { return end - begin; }
};

// The same as what a thread works with.
struct OwnSpace {
    std::vector<Element> queries, weights;
    std::vector<float> scores;

    explicit OwnSpace(const Shape &s)
        : queries(s.groups * s.padded_dim), weights(s.groups * kSpan), scores(s.groups * kSpan) {}
};

// Writes the new token where it is in the span, and attends it to the span. What `next` will read is fetched meanwhile.
inline void attend_own_span(const Shape &s, const Rows &rows, const Scoring &scoring, int64_t layer,
                            const OwnSpan &task, const OwnSpan *next, const Partials &partials, OwnSpace &space) {
    const int64_t count = task.count(), q_head = task.head * s.groups, calls = (count + 3) / 4;
    if (task.end == task.cache.position + 1) task.cache.write(s, rows, layer, task.head, task.row);
    for (int64_t query = 0; query < s.groups; ++query)
        std::memcpy(space.queries.data() + query * s.padded_dim, rows.query(q_head + query, task.row),
                    s.dim * sizeof(Element));
    const Element *const keys[] = {task.cache.key(s, layer, task.head, task.begin)};
    const Element *const values = task.cache.value(s, layer, task.head, task.begin);
    score(s, space.queries.data(), s.groups, keys, count, space.scores.data(), kSpan,
          {values, count * s.value_dim * int64_t(sizeof *values), calls});
    for (int64_t query = 0; query < s.groups; ++query) {
        const int64_t at = task.spans.partial(s, q_head + query) + task.span;
        float *const scores = space.scores.data() + query * kSpan;
        scale_scores(scoring, scores, count);
        std::tie(partials.highest[at], partials.totals[at]) =
            weigh(scores, count, space.weights.data() + query * kSpan);
    }
    Coming coming;
    if (next)
        coming = {next->cache.key(s, layer, next->head, next->begin),
                  next->count() * s.dim * int64_t(sizeof(Element)), calls};
    in_groups(0, s.groups, [&](int64_t query, auto queries) {
        float *const sums = partials.sums + (task.spans.partial(s, q_head + query) + task.span) * s.padded_value_dim;
        weigh_values<queries()>(space.weights.data() + query * kSpan, kSpan, values, s.value_dim, count, s.value_dim,
                                sums, task.spans.count * s.padded_value_dim, coming);
    });
}

} // namespace fkv
