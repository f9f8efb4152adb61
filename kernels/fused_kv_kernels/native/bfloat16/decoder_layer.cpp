// The two halves of a decoder layer, before and after attention, for few rows. Each calls the layer's operators one
// after another, because with few rows the time between calls from Python is comparable to theirs.
//
// What goes from layer to layer, the residual stream, is float32: rounded after each of the sums, it would be what most
// of a bfloat16 model's rounding error comes from.
#include "row_norm.h"

namespace {

using namespace fkv;

// A linear layer as fkv_linears takes it.
struct Layer {
    int64_t weight, bias, out, outputs;
    uint16_t *rows() const { return reinterpret_cast<uint16_t *>(out); }
};

// out = a + b; out may be a.
void add(const float *a, const uint16_t *b, float *out, int64_t count) {
    for (int64_t at = 0; at < count; at += kLanes) {
        const Mask here = first_lanes(count - at);
        store(out + at, here, load(a + at, here) + load(b + at, here));
    }
}

} // namespace

extern "C" {

// As norm_rows has it, of the residual stream.
void fkv_residual_norm(const float *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t dim, float epsilon,
                       int threads) {
    norm_rows(x, weight, out, rows, dim, epsilon, threads);
}

void fkv_rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t dim, float epsilon,
                  int threads);
void fkv_gated_silu(const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t rows, int64_t width,
                    int64_t gate_stride, int64_t up_stride, int threads);
void fkv_rotate_rows(uint16_t *x, const uint16_t *cosines, const uint16_t *sines, const int64_t *shape,
                     const int64_t *strides, int64_t half, int64_t table_batch, int threads);
void fkv_linears(const uint16_t *x, const int64_t *layers, int64_t count, int64_t rows, int64_t inner, int threads);

// x [batch rows, dim], norm [dim]: queries, keys and values of rms_norm(x), of which the first two are turned to their
// positions. `layers` are three as fkv_linears takes them; `head_norms` the addresses of norms [head_dim] that queries
// and keys go through before that, or zeros. Tables as fkv_rotate_rows takes them. `shape` is batch, rows, dim,
// head_dim, half, table_batch; `normal` [batch rows, dim] is scratch. All rows are dense.
void fkv_heads(const float *x, const uint16_t *norm, const int64_t *layers, const int64_t *head_norms,
               uint16_t *normal, const uint16_t *cosines, const uint16_t *sines, const int64_t *shape, float epsilon,
               float head_epsilon, int threads) {
    const int64_t rows = shape[0] * shape[1], dim = shape[2], head_dim = shape[3];
    fkv_residual_norm(x, norm, normal, rows, dim, epsilon, threads);
    fkv_linears(normal, layers, 3, rows, dim, threads);
    for (int64_t index = 0; index < 2; ++index) {
        const Layer &layer = reinterpret_cast<const Layer *>(layers)[index];
        const int64_t heads = layer.outputs / head_dim;
        if (head_norms[index])
            fkv_rms_norm(layer.rows(), reinterpret_cast<const uint16_t *>(head_norms[index]), layer.rows(),
                         rows * heads, head_dim, head_epsilon, threads);
        const int64_t whole[] = {shape[0], heads, shape[1]};
        const int64_t strides[] = {shape[1] * layer.outputs, head_dim, layer.outputs};
        fkv_rotate_rows(layer.rows(), cosines, sines, whole, strides, shape[4], shape[5], threads);
    }
}

// x [rows, dim], weight [dim]: out = x + rounded(down(rounded(silu(gate(n))) * up(n))), n = norm(x); out may be x.
// `layers` are gate, up and down as fkv_linears takes them; the outputs of the first two are [rows, width], that of the
// last [rows, dim]. `normal` [rows, dim] is scratch like them. All rows are dense.
void fkv_gated_mlp(const float *x, const uint16_t *weight, const int64_t *layers, uint16_t *normal, float *out,
                   int64_t rows, int64_t dim, float epsilon, int threads) {
    const Layer *const own = reinterpret_cast<const Layer *>(layers);
    const int64_t width = own[0].outputs;
    fkv_residual_norm(x, weight, normal, rows, dim, epsilon, threads);
    fkv_linears(normal, layers, 2, rows, dim, threads);
    fkv_gated_silu(own[0].rows(), own[1].rows(), own[0].rows(), rows, width, width, width, threads);
    fkv_linears(own[0].rows(), layers + 8, 1, rows, width, threads);
    add(x, own[2].rows(), out, rows * dim);
}

// The same of x + rounded(o(attended)), attended [rows, inner]; `layers` are o, gate, up and down.
void fkv_attended_mlp(const float *x, const uint16_t *attended, const uint16_t *weight, const int64_t *layers,
                      uint16_t *normal, float *out, int64_t rows, int64_t inner, int64_t dim, float epsilon,
                      int threads) {
    fkv_linears(attended, layers, 1, rows, inner, threads);
    add(x, reinterpret_cast<const Layer *>(layers)->rows(), out, rows * dim);
    fkv_gated_mlp(out, weight, layers + 4, normal, out, rows, dim, epsilon, threads);
}
}
