// Attention of one new token a sequence, each with a cache of its own: what decoding does, bound by reading the caches.
//
// A sequence's keys are cut into spans at multiples of kSpan. Each span of each key head is a task, which any thread
// may take; it leaves a highest score, a sum of weights and the weighted values of every query head, which are put
// together in the order of the spans. So a row's result depends neither on the other rows nor on the number of threads.
#include "span_attention.h"

#include <optional>

namespace {

using namespace fkv;

// One sequence: the keys [first, position] of its cache.
struct Sequence {
    Cache cache;
    Spans spans;
    int64_t first;

    Sequence(const Cache &cache, int64_t first, int64_t spans_before)
        : cache(cache), spans{spans_before, cache.position / kSpan - first / kSpan + 1}, first(first) {}
    OwnSpan task(int64_t row, int64_t number) const {
        const int64_t span = number % spans.count, begin = (first / kSpan + span) * kSpan;
        return {cache, spans, row, span, number / spans.count, std::max(first, begin),
                std::min(cache.position + 1, begin + kSpan)};
    }
};

} // namespace

extern "C" {

// Bytes of scratch that fkv_decode_attention wants.
int64_t fkv_decode_attention_scratch(const int64_t *caches, const int64_t *shape) {
    const Shape s(shape);
    int64_t spans = 0;
    for (int64_t row = 0; row < s.rows; ++row) spans += Cache::at(caches, row).position / kSpan + 1;
    return Partials::nbytes(spans * s.q_heads, s);
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
        sequences.emplace_back(Cache::at(caches, row), first_keys ? first_keys[row] : 0, tasks.back() / s.kv_heads);
        tasks.push_back(tasks.back() + sequences.back().spans.count * s.kv_heads);
    }
    const Partials partials(scratch, tasks.back() / s.kv_heads * s.q_heads);
    std::atomic<int64_t> taken(0);

#pragma omp parallel num_threads(threads)
    {
        OwnSpace space(s);
        const auto next = [&]() -> std::optional<OwnSpan> {
            const int64_t number = taken++;
            if (number >= tasks.back()) return {};
            const int64_t row = std::upper_bound(tasks.begin(), tasks.end(), number) - tasks.begin() - 1;
            return sequences[row].task(row, number - tasks[row]);
        };
        for (std::optional<OwnSpan> task = next(); task;) {
            const std::optional<OwnSpan> coming = next();
            attend_own_span(s, rows, scoring, layer, *task, coming ? &*coming : nullptr, partials, space);
            task = coming;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t at = 0; at < s.rows * s.q_heads; ++at)
            combine(s, scoring, sequences[at / s.q_heads].spans, at % s.q_heads, partials, out + at * s.value_dim);
    }
}
}
