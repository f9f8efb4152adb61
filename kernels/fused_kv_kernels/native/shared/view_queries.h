// Chunks as sequences see them, and what is made of a query to see one: what a sequence has changed in a chunk is
// brought to its queries, so that the chunk stays as it is for all.
#pragma once

#include "rotation.h"
#include "span_attention.h"

namespace fkv {

constexpr int64_t kChunkSpan = 256; // tokens of a chunk that are a task
constexpr int kMostParts = 3;

// Addresses of one chunk's keys and values, elements from layer to layer and head to head in each; its tokens; the
// addresses of its shift's bytes and scales, of keys and of values, [layers, heads, tokens], or zeros; and which of the
// views are of it.
struct Chunk {
    const Element *keys, *values;
    int64_t key_layer, key_head, value_layer, value_head, tokens;
    const int8_t *shift_keys;
    const float *key_scales;
    const int8_t *shift_values;
    const float *value_scales;
    int64_t first_view, views;

    static constexpr int64_t kNumbers = 13;
    int64_t spans() const { return (tokens + kChunkSpan - 1) / kChunkSpan; }
};

// A chunk as one sequence sees it: the sequence, its spans that come before this chunk's, the weights of the shift
// [layers, 2] or none, the vectors that are added [layers, heads, dim] or none, the hidden tokens, ascending, and
// cosines and sines of its distance and of its start [kinds, 2, 2, half].
struct View {
    int64_t row, before;
    const float *weights, *key_vectors, *value_vectors;
    const int64_t *hidden;
    int64_t hidden_count;
    const float *turns;

    static constexpr int64_t kNumbers = 8;
};

// What is the same for a whole call.
struct Call {
    Shape s;
    Rows rows;
    Scoring scoring;
    int64_t layer, kind, half, interleaved;
    const Element *waves; // cosines and sines of places in a chunk [tokens, dim]
    const Chunk *chunks;
    const View *views;
    const Spans *spans; // of the sequences
    Partials partials;
};

// What a thread works with: `count` queries of one key head, of all sequences that see a chunk.
struct ChunkSpace {
    std::vector<Element> queries, weights, shift_weights, shift_keys, shift_values;
    std::vector<float> scores, sums, shift_sums, query, moved;

    ChunkSpace(const Shape &s, int64_t views)
        : queries(views * s.groups * kMostParts * s.padded_dim), weights(views * s.groups * kChunkSpan),
          shift_weights(weights.size()), shift_keys(kChunkSpan * s.dim), shift_values(kChunkSpan * s.value_dim),
          scores(views * s.groups * kChunkSpan), sums(views * s.groups * s.padded_value_dim), shift_sums(sums.size()),
          query(s.padded_dim + kLanes), moved(s.padded_dim + kLanes) {}
};

// Turns a query back by angles [2, half] into floats.
inline void turn_back(const Call &call, const Element *query, const float *angles, float *to) {
    const Angles by(angles, angles + call.half, call.half, call.s.dim);
    const auto read = [&](int64_t column, int64_t count) { return load(query + column, first_lanes(count)); };
    const auto take = [&](int64_t column, int64_t count, Lanes value) {
        store_floats(to + column, first_lanes(count), value);
    };
    if (call.interleaved)
        turn<true, true>(by, read, take);
    else
        turn<false, true>(by, read, take);
}

// The coefficients of the waves: what a query, turned back by a chunk's start, has with a vector.
inline void with_vector(const Call &call, const float *__restrict query, const float *__restrict vector,
                 float *__restrict to) {
    const int64_t half = call.half, step = call.interleaved ? 2 : 1, apart = call.interleaved ? 1 : half;
    for (int64_t pair = 0; pair < half; ++pair) {
        const int64_t one = pair * step, other = one + apart;
        to[pair] = query[one] * vector[one] + query[other] * vector[other];
        to[half + pair] = query[other] * vector[one] - query[one] * vector[other];
    }
    for (int64_t column = 2 * half; column < call.s.dim; ++column) to[column] = query[column] * vector[column];
}

inline void store_row(const float *from, float factor, int64_t dim, Element *to) {
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Mask here = first_lanes(dim - column);
        store(to + column, here, load_floats(from + column, here) * factor);
    }
}

// Which parts a key has beside what is stored.
struct Which {
    bool shift, vectors;
};

// The parts of one query: for the keys, for their shift and for the waves.
inline void make_query(const Call &call, const View &view, int64_t q_head, Which which, ChunkSpace &space,
                       Element *to) {
    const Shape &s = call.s;
    const Element *const query = call.rows.query(q_head, view.row);
    const float *const turns = view.turns + call.kind * 4 * call.half;
    turn_back(call, query, turns, space.query.data());
    store_row(space.query.data(), 1.0f, s.dim, to);
    if (which.shift) {
        to += s.padded_dim;
        store_row(space.query.data(), view.weights ? view.weights[call.layer * 2] : 0.0f, s.dim, to);
    }
    if (!which.vectors) return;
    to += s.padded_dim;
    if (view.key_vectors) {
        const int64_t at = call.layer * s.kv_heads + q_head / s.groups;
        turn_back(call, query, turns + 2 * call.half, space.query.data());
        with_vector(call, space.query.data(), view.key_vectors + at * s.dim, space.moved.data());
        store_row(space.moved.data(), 1.0f, s.dim, to);
    } else {
        std::fill(to, to + s.padded_dim, Element{});
    }
}

} // namespace fkv
