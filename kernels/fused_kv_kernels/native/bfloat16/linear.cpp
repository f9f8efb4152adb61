// Linear layers for few rows on AVX512-BF16: the weights are read once, in place.
//
// Matrix libraries first bring the weights into a layout of their own, at every call or as a second copy that is kept.
// With few rows that takes as long as the products. Here both operands are read along the inner dimension, and the
// lanes of a register are added up at the end.
#include "lane_sums.h"

namespace {

using namespace fkv;

constexpr int kOutputs = 4; // rows of the weights; with six of the input, 24 accumulators
constexpr int kInputs = 6;
constexpr int kStep = 32; // bfloat16 of a register, and of a cache line
// So much of the weights is on its way from memory while others are multiplied: less comes too late, more is in the way
// of the rows in the first-level cache.
constexpr int64_t kBytesAhead = 8192;

template <typename Out> struct Layer {
    const uint16_t *weight, *bias;
    Out *out;
    int64_t outputs;
};

inline void store_four(uint16_t *to, __m128 sums) {
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), (__m128i)_mm_cvtneps_pbh(sums));
}
inline void store_four(float *to, __m128 sums) { _mm_storeu_ps(to, sums); }

inline __m512bh load_step(const uint16_t *from) { return (__m512bh)_mm512_loadu_si512(from); }

// Four outputs of some rows. Of the weights `coming`, so many rows are fetched from memory meanwhile.
template <int Rows, typename Out>
void multiply(const uint16_t *x, const uint16_t *weight, const uint16_t *bias, Out *out, int64_t out_row,
              int64_t inner, const uint16_t *coming, int64_t coming_rows) {
    Lanes sums[Rows][kOutputs];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int output = 0; output < kOutputs; ++output) sums[row][output] = _mm512_setzero_ps();
    for (int64_t at = 0; at < inner; at += kStep) {
        for (int64_t row = 0; row < coming_rows; ++row)
            _mm_prefetch(reinterpret_cast<const char *>(coming + row * inner + at), _MM_HINT_T0);
        __m512bh right[kOutputs];
#pragma GCC unroll 4
        for (int output = 0; output < kOutputs; ++output) right[output] = load_step(weight + output * inner + at);
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
            const __m512bh left = load_step(x + row * inner + at);
#pragma GCC unroll 4
            for (int output = 0; output < kOutputs; ++output)
                sums[row][output] = _mm512_dpbf16_ps(sums[row][output], left, right[output]);
        }
    }
    __m128 offset = _mm_setzero_ps();
    if (bias)
        offset = _mm_castsi128_ps(
            _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bias))), 16));
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
        store_four(out + row * out_row, _mm_add_ps(sum_of_each(sums[row]), offset));
}

template <typename... Arguments> void multiply_rows(int64_t rows, Arguments... arguments) {
    switch (rows) {
    case 1: return multiply<1>(arguments...);
    case 2: return multiply<2>(arguments...);
    case 3: return multiply<3>(arguments...);
    case 4: return multiply<4>(arguments...);
    case 5: return multiply<5>(arguments...);
    default: return multiply<6>(arguments...);
    }
}

template <typename Out>
void four_outputs(const Layer<Out> &layer, int64_t first, const uint16_t *x, int64_t rows, int64_t inner) {
    const int64_t parts = (rows + kInputs - 1) / kInputs, groups = (kBytesAhead - 1) / (kOutputs * inner * 2) + 1;
    const int64_t next = first + kOutputs * groups;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
        const int64_t from = kOutputs * part / parts, to = kOutputs * (part + 1) / parts;
        multiply_rows(end - begin, x + begin * inner, layer.weight + first * inner,
                      layer.bias ? layer.bias + first : nullptr, layer.out + begin * layer.outputs + first,
                      layer.outputs, inner, layer.weight + (next + from) * inner,
                      next < layer.outputs ? to - from : 0);
    }
}

template <typename Out>
void multiply_layers(const uint16_t *x, const int64_t *layers, int64_t count, int64_t rows, int64_t inner,
                     int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t index = 0; index < count; ++index) {
        Layer<Out> layer;
        std::memcpy(&layer, layers + index * 4, sizeof layer);
#pragma omp for schedule(static) nowait
        for (int64_t group = 0; group < layer.outputs / kOutputs; ++group)
            four_outputs(layer, group * kOutputs, x, rows, inner);
    }
}

} // namespace

extern "C" {

// out [R, O] = x [R, I] weight [O, I]^T + bias [O] of several layers. A layer is four numbers: addresses of its
// weights, of its bias (or zero) and of its output, and O. All rows are dense, I is a multiple of 32 and O of 4. Sums
// are formed in float32, in the same order whatever the number of threads, and rounded once.
void fkv_linears(const uint16_t *x, const int64_t *layers, int64_t count, int64_t rows, int64_t inner, int threads) {
    multiply_layers<uint16_t>(x, layers, count, rows, inner, threads);
}

// The same of one layer whose output is float32: the sums as they are.
void fkv_float_linear(const uint16_t *x, const int64_t *layer, int64_t rows, int64_t inner, int threads) {
    multiply_layers<float>(x, layer, 1, rows, inner, threads);
}
}
