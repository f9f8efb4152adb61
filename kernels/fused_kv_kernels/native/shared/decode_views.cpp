// Attention of one new token a sequence to chunks that sequences share, and to a cache of its own.
//
// A chunk is read once for all sequences that see it. What each of them has changed in it is brought to its queries:
// they are moved back by the chunk's distance, multiplied by the weight of its shift for a second product, and made
// into the coefficients of a third one for the vector that deviation transfer adds. So a key is up to three rows side
// by side: what is stored, its shift, and cosines and sines of its place. Spans are put together as in
// decode_attention.cpp.
#include "view_queries.h"

namespace {

using namespace fkv;

// Rows of eight bits, multiplied by their scales. `coming` is fetched meanwhile, as in all that follows.
void widen(const int8_t *bytes, const float *scales, int64_t rows, int64_t dim, Element *to, Coming coming) {
    for (int64_t row = 0; row < rows; ++row, coming.fetch())
        for (int64_t column = 0; column < dim; column += kLanes) {
            const int64_t count = dim - column, at = row * dim + column;
            store(to + at, first_lanes(count), load_bytes(bytes + at, count) * scales[row]);
        }
}

// The weights of the shifted values: those of the values times the weight of the view's shift.
void weigh_shift(const Element *weights, float factor, int64_t count, Element *to) {
    for (int64_t at = 0; at < count; at += kLanes)
        store(to + at, first_lanes(kLanes), load(weights + at, first_lanes(kLanes)) * factor);
}

// One span of one key head of a chunk.
struct ChunkSpan {
    const Chunk *chunk;
    int64_t span, head;

    int64_t begin() const { return span * kChunkSpan; }
    int64_t count() const { return std::min(kChunkSpan, chunk->tokens - begin()); }
    // Where the span's first token is among all scales of a shift.
    int64_t shift_row(const Call &call) const {
        return (call.layer * call.s.kv_heads + head) * chunk->tokens + begin();
    }
    const Element *keys(const Call &call) const {
        return chunk->keys + call.layer * chunk->key_layer + head * chunk->key_head + begin() * call.s.dim;
    }
    const Element *values(const Call &call) const {
        return chunk->values + call.layer * chunk->value_layer + head * chunk->value_head + begin() * call.s.value_dim;
    }
    const int8_t *shift_keys(const Call &call) const { return chunk->shift_keys + shift_row(call) * call.s.dim; }
    const int8_t *shift_values(const Call &call) const {
        return chunk->shift_values + shift_row(call) * call.s.value_dim;
    }
    int64_t queries(const Call &call) const { return chunk->views * call.s.groups; }
    int64_t q_head(const Call &call, int64_t query) const { return head * call.s.groups + query % call.s.groups; }
    const View &view(const Call &call, int64_t query) const {
        return call.views[chunk->first_view + query / call.s.groups];
    }
    int64_t partial(const Call &call, int64_t query) const {
        const View &of = view(call, query);
        return call.spans[of.row].partial(call.s, q_head(call, query)) + of.before + span;
    }
    bool has_vectors(const Call &call) const {
        const View *const first = call.views + chunk->first_view;
        return std::any_of(first, first + chunk->views, [](const View &view) { return view.key_vectors; });
    }
};

// Leaves scores of all queries to a span in the space.
template <int Parts>
void score_parts(const Call &call, const ChunkSpan &task, const Element *const (&parts)[Parts], Which which,
                 ChunkSpace &space) {
    const Shape &s = call.s;
    for (int64_t query = 0; query < task.queries(call); ++query)
        make_query(call, task.view(call, query), task.q_head(call, query), which, space,
                   space.queries.data() + query * Parts * s.padded_dim);
    const void *const next = which.shift ? static_cast<const void *>(task.shift_values(call)) : task.values(call);
    const int64_t nbytes = task.count() * s.value_dim * (which.shift ? 1 : int64_t(sizeof(Element)));
    score(s, space.queries.data(), task.queries(call), parts, task.count(), space.scores.data(), kChunkSpan,
          {next, nbytes, (task.count() + 3) / 4});
}

void score_chunk(const Call &call, const ChunkSpan &task, ChunkSpace &space) {
    const Shape &s = call.s;
    const Which which{task.chunk->shift_keys != nullptr, task.has_vectors(call)};
    const Element *const keys = task.keys(call), *const shift = space.shift_keys.data();
    const Element *const waves = call.waves + task.begin() * s.dim;
    if (which.shift)
        widen(task.shift_keys(call), task.chunk->key_scales + task.shift_row(call), task.count(), s.dim,
              space.shift_keys.data(), {keys, task.count() * s.dim * int64_t(sizeof *keys), task.count()});
    if (which.shift && which.vectors)
        score_parts<3>(call, task, {keys, shift, waves}, which, space);
    else if (which.shift)
        score_parts<2>(call, task, {keys, shift}, which, space);
    else if (which.vectors)
        score_parts<2>(call, task, {keys, waves}, which, space);
    else
        score_parts<1>(call, task, {keys}, which, space);
}

// Turns scores into weights, and into those of the shifted values; leaves their maxima and sums in the partials.
void weigh_chunk(const Call &call, const ChunkSpan &task, ChunkSpace &space) {
    const int64_t begin = task.begin(), count = task.count();
    for (int64_t query = 0; query < task.queries(call); ++query) {
        const View &view = task.view(call, query);
        float *const scores = space.scores.data() + query * kChunkSpan;
        scale_scores(call.scoring, scores, count);
        const int64_t *const end = view.hidden + view.hidden_count;
        for (const int64_t *at = std::lower_bound(view.hidden, end, begin); at < end && *at < begin + count; ++at)
            scores[*at - begin] = kMinusInfinity;
        Element *const weights = space.weights.data() + query * kChunkSpan;
        const int64_t at = task.partial(call, query);
        std::tie(call.partials.highest[at], call.partials.totals[at]) = weigh(scores, count, weights);
        if (task.chunk->shift_values)
            weigh_shift(weights, view.weights ? view.weights[call.layer * 2 + 1] : 0.0f, count,
                        space.shift_weights.data() + query * kChunkSpan);
    }
}

// Adds up what a query has in a span: the values, their shift, and the vector that is added to each.
void write_sums(const Call &call, const ChunkSpan &task, int64_t query, const ChunkSpace &space) {
    const Shape &s = call.s;
    const View &view = task.view(call, query);
    const int64_t at = task.partial(call, query);
    const float *const sums = space.sums.data() + query * s.padded_value_dim;
    const float *const shift_sums = space.shift_sums.data() + query * s.padded_value_dim;
    const int64_t vector_at = (call.layer * s.kv_heads + task.head) * s.value_dim;
    for (int64_t column = 0; column < s.value_dim; column += kLanes) {
        const Mask here = first_lanes(s.value_dim - column);
        Lanes sum = load_floats(sums + column, here);
        if (task.chunk->shift_values) sum += load_floats(shift_sums + column, here);
        if (view.value_vectors)
            sum += load_floats(view.value_vectors + vector_at + column, here) * call.partials.totals[at];
        store_floats(call.partials.sums + at * s.padded_value_dim + column, here, sum);
    }
}

void attend_chunk_span(const Call &call, const ChunkSpan &task, const ChunkSpan *next, ChunkSpace &space) {
    const Shape &s = call.s;
    const int64_t count = task.count();
    const Element *const values = task.values(call);
    score_chunk(call, task, space);
    weigh_chunk(call, task, space);
    if (task.chunk->shift_values)
        widen(task.shift_values(call), task.chunk->value_scales + task.shift_row(call), count, s.value_dim,
              space.shift_values.data(), {values, count * s.value_dim * int64_t(sizeof *values), count});
    Coming coming;
    if (next && next->chunk->shift_keys)
        coming = {next->shift_keys(call), next->count() * s.dim, (count + 3) / 4};
    else if (next)
        coming = {next->keys(call), next->count() * s.dim * int64_t(sizeof *values), (count + 3) / 4};
    in_groups(0, task.queries(call), [&](int64_t query, auto number) {
        const auto weighed = [&](const std::vector<Element> &weights, const Element *rows, std::vector<float> &sums) {
            weigh_values<number()>(weights.data() + query * kChunkSpan, kChunkSpan, rows, s.value_dim, count,
                                   s.value_dim, sums.data() + query * s.padded_value_dim, s.padded_value_dim, coming);
        };
        weighed(space.weights, values, space.sums);
        if (task.chunk->shift_values) weighed(space.shift_weights, space.shift_values.data(), space.shift_sums);
    });
    for (int64_t query = 0; query < task.queries(call); ++query) write_sums(call, task, query, space);
}

// Tasks of a call: spans of chunks, which take longest, then spans of the sequences' own caches.
struct Tasks {
    std::vector<ChunkSpan> of_chunks;
    std::vector<OwnSpan> own;
};

Tasks tasks_of(const Shape &s, const int64_t *caches, const std::vector<Chunk> &chunks, const Spans *spans) {
    Tasks tasks;
    for (const Chunk &chunk : chunks)
        for (int64_t head = 0; head < s.kv_heads; ++head)
            for (int64_t span = 0; span < chunk.spans(); ++span) tasks.of_chunks.push_back({&chunk, span, head});
    for (int64_t row = 0; row < s.rows; ++row) {
        const Cache cache = Cache::at(caches, row);
        for (int64_t head = 0; head < s.kv_heads; ++head)
            for (int64_t begin = 0; begin <= cache.position; begin += kSpan)
                tasks.own.push_back({cache, spans[row], row, begin / kSpan, head, begin,
                                     std::min(cache.position + 1, begin + kSpan)});
    }
    return tasks;
}

} // namespace

extern "C" {

// How many keys of a sequence's own cache, and tokens of a chunk, are a span.
void fkv_span_sizes(int64_t *sizes) {
    sizes[0] = kSpan;
    sizes[1] = kChunkSpan;
}

// Bytes of scratch for `spans` spans of all sequences.
int64_t fkv_decode_views_scratch(int64_t spans, const int64_t *shape) {
    const Shape s(shape);
    return Partials::nbytes(spans * s.q_heads, s);
}

// The rest as fkv_decode_attention takes it. `spans` [R, 2]: how many spans come before a sequence's, and how many are
// its own; those of its cache come first. `counts`: chunks and views; layer, which of the kinds of layers it is, pairs
// that are turned and whether they are interleaved.
void fkv_decode_views(const Element *q, const Element *k, const Element *v, Element *out, const int64_t *caches,
                      const int64_t *chunk_table, const int64_t *view_table, const int64_t *spans_table,
                      const Element *waves, const int64_t *counts, const float *sinks, float *scratch,
                      const int64_t *shape, const int64_t *strides, float scale, float softcap, int threads) {
    const Shape s(shape);
    static_assert(sizeof(Chunk) == Chunk::kNumbers * 8 && sizeof(View) == View::kNumbers * 8, "as in the tables");
    static_assert(sizeof(Spans) == 2 * 8, "as in the table");
    std::vector<Chunk> chunks(counts[0]);
    std::vector<View> views(counts[1]);
    std::vector<Spans> spans(s.rows);
    std::memcpy(static_cast<void *>(chunks.data()), chunk_table, chunks.size() * sizeof(Chunk));
    std::memcpy(static_cast<void *>(views.data()), view_table, views.size() * sizeof(View));
    std::memcpy(static_cast<void *>(spans.data()), spans_table, spans.size() * sizeof(Spans));
    int64_t most_views = 0;
    for (const Chunk &chunk : chunks) most_views = std::max(most_views, chunk.views);
    const Tasks tasks = tasks_of(s, caches, chunks, spans.data());
    const int64_t span_count = spans.empty() ? 0 : spans.back().before + spans.back().count;
    const Call call{s, {q, k, v, out, strides}, {nullptr, nullptr, sinks, scale, softcap}, counts[2], counts[3],
                    counts[4], counts[5], waves, chunks.data(), views.data(), spans.data(),
                    Partials(scratch, span_count * s.q_heads)};
    const int64_t of_chunks = tasks.of_chunks.size(), all = of_chunks + static_cast<int64_t>(tasks.own.size());
    std::atomic<int64_t> taken(0);

#pragma omp parallel num_threads(threads)
    {
        ChunkSpace chunk_space(s, most_views);
        OwnSpace own_space(s);
        for (int64_t task = taken++, coming; task < all; task = coming) {
            coming = taken++;
            if (task < of_chunks) {
                const ChunkSpan *const next = coming < of_chunks ? &tasks.of_chunks[coming] : nullptr;
                attend_chunk_span(call, tasks.of_chunks[task], next, chunk_space);
            } else {
                const OwnSpan *const next = coming < all ? &tasks.own[coming - of_chunks] : nullptr;
                attend_own_span(s, call.rows, call.scoring, call.layer, tasks.own[task - of_chunks], next,
                                call.partials, own_space);
            }
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t at = 0; at < s.rows * s.q_heads; ++at)
            combine(s, call.scoring, spans[at / s.q_heads], at % s.q_heads, call.partials, out + at * s.value_dim);
    }
}
}
