// The element-wise steps between a decoder's matrix products: RMS norm, rotary positions, and the gate of its MLP. Each
// makes one pass over the memory and rounds to the dtype exactly where transformers' own code does.
#include "row_norm.h"

namespace {
using namespace fkv;
}

extern "C" {

// As norm_rows has it.
void fkv_rms_norm(const Element *x, const Element *weight, Element *out, int64_t rows, int64_t dim, float epsilon,
                  int threads) {
    norm_rows(x, weight, out, rows, dim, epsilon, threads);
}

// gate and up [rows, width] by their row strides, out dense: out = rounded(gate / (1 + e^-gate)) * up.
void fkv_gated_silu(const Element *gate, const Element *up, Element *out, int64_t rows, int64_t width,
                    int64_t gate_stride, int64_t up_stride, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < width; column += kLanes) {
            const Mask here = first_lanes(width - column);
            const Lanes value = load(gate + row * gate_stride + column, here);
            const Lanes active = rounded(value / (1.0f + exp_lanes(-value)));
            store(out + row * width + column, here, active * load(up + row * up_stride + column, here));
        }
}

// x [batch, heads, rows, >= 2 half] by its strides (batch, head, row), in place; cosines and sines [rows, 2 half], or
// one such table a sequence, `table_batch` elements apart: x = rounded(x cos) + rounded(rotate_half(x) sin).
void fkv_rotate_rows(Element *x, const Element *cosines, const Element *sines, const int64_t *shape,
                     const int64_t *strides, int64_t half, int64_t table_batch, int threads) {
    const int64_t batch = shape[0], heads = shape[1], rows = shape[2];
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < batch * rows; ++task) {
        const int64_t sequence = task / rows, row = task % rows;
        const Element *cosine = cosines + sequence * table_batch + row * 2 * half;
        const Element *sine = sines + sequence * table_batch + row * 2 * half;
        for (int64_t head = 0; head < heads; ++head) {
            Element *at = x + sequence * strides[0] + head * strides[1] + row * strides[2];
            for (int64_t column = 0; column < half; column += kLanes) {
                const Mask here = first_lanes(half - column);
                const Lanes first = load(at + column, here), second = load(at + half + column, here);
                const Lanes turned = second * load(sine + column, here);
                const Lanes other = first * load(sine + half + column, here);
                const Lanes kept = first * load(cosine + column, here);
                const Lanes left = second * load(cosine + half + column, here);
                store(at + column, here, rounded(kept) - rounded(turned));
                store(at + half + column, here, rounded(left) + rounded(other));
            }
        }
    }
}
}
