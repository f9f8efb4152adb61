// Several decoder layers of a step that decodes, one after another: with a row for each sequence, what Python does
// between a layer's three operators counts beside what they take.
#include "element.h"

#include <utility>

namespace {

using namespace fkv;

struct Linear {
    int64_t weight, bias;
};

// A decoder layer's weights, by address; a bias and the norms of heads may be zero.
struct LayerWeights {
    int64_t norm;
    Linear queries, keys, values;
    int64_t head_norms[2];
    Linear output;
    int64_t mlp_norm;
    Linear gate, up, down;
};

// What norms add to a variance, of a layer's input, of heads and before the MLP.
struct Epsilons {
    float input, heads, mlp;
};

struct Shape {
    int64_t rows, dim, q_heads, kv_heads, head_dim, width, half;
};

// Working memory for rows of one layer, one part behind another.
struct Space {
    uint16_t *queries, *keys, *values, *attended, *normal, *gate, *up, *added;

    Space(uint16_t *memory, const Shape &s) {
        const int64_t of_queries = s.q_heads * s.head_dim, of_keys = s.kv_heads * s.head_dim;
        const auto take = [&](int64_t columns) { return std::exchange(memory, memory + s.rows * columns); };
        queries = take(of_queries);
        keys = take(of_keys);
        values = take(of_keys);
        attended = take(of_queries);
        normal = take(s.dim);
        gate = take(s.width);
        up = take(s.width);
        added = take(s.dim);
    }
    static int64_t columns(const Shape &s) {
        return 2 * (s.q_heads + s.kv_heads) * s.head_dim + 2 * s.dim + 2 * s.width;
    }
};

template <typename Number> int64_t address(const Number *of) { return reinterpret_cast<int64_t>(of); }
template <typename Number> const Number *at(int64_t address) { return reinterpret_cast<const Number *>(address); }

} // namespace

extern "C" {

void fkv_heads(const float *x, const uint16_t *norm, const int64_t *layers, const int64_t *head_norms,
               uint16_t *normal, const uint16_t *cosines, const uint16_t *sines, const int64_t *shape, float epsilon,
               float head_epsilon, int threads);
void fkv_attended_mlp(const float *x, const uint16_t *attended, const uint16_t *weight, const int64_t *layers,
                      uint16_t *normal, float *out, int64_t rows, int64_t inner, int64_t dim, float epsilon,
                      int threads);
void fkv_decode_attention(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out,
                          const int64_t *caches, int64_t layer, const int64_t *first_keys, const float *sinks,
                          float *scratch, const int64_t *shape, const int64_t *strides, float scale, float softcap,
                          int threads);

// Bytes of scratch that fkv_decode_layers wants, beside that of its attention.
int64_t fkv_decode_layers_scratch(const int64_t *shape) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    return Space::columns(s) * s.rows * int64_t(sizeof(uint16_t));
}

// x [R, dim], the residual stream: the rows that enter the first of `count` layers, and then those that leave the last.
// `weights` and `epsilons` are a LayerWeights and Epsilons a layer. Tables [R, 2 half] as fkv_rotate_rows takes them.
// `caches`, first keys and the scale are those of fkv_decode_attention, whose layers are counted from `first_layer`; its
// scratch is the second one.
void fkv_decode_layers(float *x, const int64_t *weights, const float *epsilons, int64_t count,
                       const uint16_t *cosines, const uint16_t *sines, const int64_t *caches, int64_t first_layer,
                       const int64_t *first_keys, uint16_t *scratch, float *attention_scratch, const int64_t *shape,
                       float scale, int threads) {
    Shape s;
    std::memcpy(&s, shape, sizeof s);
    const Space space(scratch, s);
    const int64_t of_queries = s.q_heads * s.head_dim, of_keys = s.kv_heads * s.head_dim;
    const int64_t of_heads[] = {1, s.rows, s.dim, s.head_dim, s.half, 0};
    const int64_t of_attention[] = {s.q_heads, s.kv_heads, s.rows, s.head_dim, s.head_dim};
    const int64_t strides[] = {s.head_dim, of_queries, s.head_dim, of_keys, s.head_dim, of_keys};
    for (int64_t layer = 0; layer < count; ++layer) {
        LayerWeights w;
        Epsilons epsilon;
        std::memcpy(&w, weights + layer * (sizeof w / 8), sizeof w);
        std::memcpy(&epsilon, epsilons + layer * (sizeof epsilon / 4), sizeof epsilon);
        const int64_t heads[] = {w.queries.weight, w.queries.bias, address(space.queries), of_queries,
                                 w.keys.weight,    w.keys.bias,    address(space.keys),    of_keys,
                                 w.values.weight,  w.values.bias,  address(space.values),  of_keys};
        fkv_heads(x, at<uint16_t>(w.norm), heads, w.head_norms, space.normal, cosines, sines, of_heads, epsilon.input,
                  epsilon.heads, threads);
        fkv_decode_attention(space.queries, space.keys, space.values, space.attended, caches, first_layer + layer,
                             first_keys, nullptr, attention_scratch, of_attention, strides, scale, 0.0f, threads);
        const int64_t mlp[] = {w.output.weight, w.output.bias, address(space.added), s.dim,
                               w.gate.weight,   w.gate.bias,   address(space.gate),  s.width,
                               w.up.weight,     w.up.bias,     address(space.up),    s.width,
                               w.down.weight,   w.down.bias,   address(space.added), s.dim};
        fkv_attended_mlp(x, space.attended, at<uint16_t>(w.mlp_norm), mlp, space.normal, x, s.rows, of_queries,
                         s.dim, epsilon.mlp, threads);
    }
}
}
