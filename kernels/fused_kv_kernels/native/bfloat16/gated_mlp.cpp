// The second half of a decoder layer for few rows. Its operators are those of the whole layer's, called one after the
// other: with few rows, what stands between calls from Python takes as long as they do.
#include "element.h"

extern "C" {

void fkv_rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t dim, float epsilon,
                  int threads);
void fkv_gated_silu(const uint16_t *gate, const uint16_t *up, uint16_t *out, int64_t rows, int64_t width,
                    int64_t gate_stride, int64_t up_stride, int threads);
void fkv_linears(const uint16_t *x, const int64_t *layers, int64_t count, int64_t rows, int64_t inner, int threads);

// x [rows, dim], weight [dim]: out = x + rounded(down(rounded(silu(gate(n))) * up(n))), n = rms_norm(x). `layers` are
// gate, up and down as fkv_linears takes them; the outputs of the first two are [rows, width], that of the last is out.
// `normal` [rows, dim] is scratch. All rows are dense.
void fkv_gated_mlp(const uint16_t *x, const uint16_t *weight, const int64_t *layers, uint16_t *normal, int64_t rows,
                   int64_t dim, float epsilon, int threads) {
    using namespace fkv;
    fkv_rms_norm(x, weight, normal, rows, dim, epsilon, threads);
    fkv_linears(normal, layers, 2, rows, dim, threads);
    uint16_t *const gate = reinterpret_cast<uint16_t *>(layers[2]);
    const int64_t width = layers[3];
    fkv_gated_silu(gate, reinterpret_cast<uint16_t *>(layers[6]), gate, rows, width, width, width, threads);
    fkv_linears(gate, layers + 8, 1, rows, width, threads);
    uint16_t *const out = reinterpret_cast<uint16_t *>(layers[10]);
    for (int64_t column = 0; column < rows * dim; column += kLanes) {
        const Mask here = first_lanes(rows * dim - column);
        store(out + column, here, load(x + column, here) + load(out + column, here));
    }
}
}
