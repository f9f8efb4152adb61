// Deviation transfer: the mean deviation of a chunk's recomputed tokens, added to the stored KV of all its tokens.
#include "tiles.h"

namespace {

using namespace fkv;

constexpr int64_t kLargestDim = 1024; // operators.py hands over no larger one

// R(p) (first, second); with a negated sine R(-p).
inline void turned(__m512 first, __m512 second, __m512 cosine, __m512 sine, __m512 &one, __m512 &two) {
    one = _mm512_fnmadd_ps(second, sine, _mm512_mul_ps(first, cosine));
    two = _mm512_fmadd_ps(first, sine, _mm512_mul_ps(second, cosine));
}

} // namespace

extern "C" {

// fresh_keys and fresh_values by strides (key head, key row, value head, value row); row fresh_rows[i] of them replaces
// position selected[i] of the layer. bounds [chunks + 1] cuts `selected` by chunk, spans [chunks, 2] are the chunks'
// positions, weights [chunks] multiply the summed deviation. cosines and sines: float32 [positions, half].
void fkv_transfer(const uint16_t *fresh_keys, const uint16_t *fresh_values, const int64_t *fresh_strides,
                  const int64_t *fresh_rows, const int64_t *selected, const int64_t *bounds, const int64_t *spans,
                  const float *weights, int64_t chunks, const float *cosines, const float *sines, uint16_t *keys,
                  uint16_t *values, int64_t key_head, int64_t value_head, int64_t heads, int64_t dim, int64_t half,
                  int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < chunks * heads; ++task) {
        const int64_t chunk = task / heads, head = task % heads;
        if (bounds[chunk] == bounds[chunk + 1]) continue;
        alignas(64) float key_sum[kLargestDim] = {}, value_sum[kLargestDim] = {};
        uint16_t *layer_keys = keys + head * key_head, *layer_values = values + head * value_head;
        for (int64_t i = bounds[chunk]; i < bounds[chunk + 1]; ++i) {
            const int64_t at = selected[i];
            const uint16_t *new_key = fresh_keys + head * fresh_strides[0] + fresh_rows[i] * fresh_strides[1];
            const uint16_t *new_value = fresh_values + head * fresh_strides[2] + fresh_rows[i] * fresh_strides[3];
            const uint16_t *old_key = layer_keys + at * dim, *old_value = layer_values + at * dim;
            for (int64_t column = 0; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                const __m512 change = _mm512_sub_ps(load_wide(new_value + column, here), load_wide(old_value + column, here));
                _mm512_mask_storeu_ps(value_sum + column, here,
                                      _mm512_add_ps(_mm512_maskz_loadu_ps(here, value_sum + column), change));
            }
            for (int64_t column = 0; column < half; column += kLanes) {
                const __mmask16 here = first_lanes(half - column);
                const int64_t other = column + half;
                const __m512 first = _mm512_sub_ps(load_wide(new_key + column, here), load_wide(old_key + column, here));
                const __m512 second = _mm512_sub_ps(load_wide(new_key + other, here), load_wide(old_key + other, here));
                const __m512 cosine = _mm512_maskz_loadu_ps(here, cosines + at * half + column);
                const __m512 sine = _mm512_maskz_loadu_ps(here, sines + at * half + column);
                __m512 one, two;
                turned(first, second, cosine, _mm512_sub_ps(_mm512_setzero_ps(), sine), one, two);
                _mm512_mask_storeu_ps(key_sum + column, here, _mm512_add_ps(_mm512_maskz_loadu_ps(here, key_sum + column), one));
                _mm512_mask_storeu_ps(key_sum + other, here, _mm512_add_ps(_mm512_maskz_loadu_ps(here, key_sum + other), two));
            }
            for (int64_t column = 2 * half; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                const __m512 change = _mm512_sub_ps(load_wide(new_key + column, here), load_wide(old_key + column, here));
                _mm512_mask_storeu_ps(key_sum + column, here,
                                      _mm512_add_ps(_mm512_maskz_loadu_ps(here, key_sum + column), change));
            }
        }
        for (int64_t column = 0; column < dim; ++column) {
            key_sum[column] *= weights[chunk];
            value_sum[column] *= weights[chunk];
        }
        for (int64_t at = spans[2 * chunk]; at < spans[2 * chunk + 1]; ++at) {
            uint16_t *key = layer_keys + at * dim, *value = layer_values + at * dim;
            for (int64_t column = 0; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                const __m512 sum = _mm512_maskz_loadu_ps(here, value_sum + column);
                store_narrow(value + column, here, _mm512_add_ps(load_wide(value + column, here), sum));
            }
            for (int64_t column = 0; column < half; column += kLanes) {
                const __mmask16 here = first_lanes(half - column);
                const int64_t other = column + half;
                __m512 one, two;
                turned(_mm512_maskz_loadu_ps(here, key_sum + column), _mm512_maskz_loadu_ps(here, key_sum + other),
                       _mm512_maskz_loadu_ps(here, cosines + at * half + column),
                       _mm512_maskz_loadu_ps(here, sines + at * half + column), one, two);
                store_narrow(key + column, here, _mm512_add_ps(load_wide(key + column, here), one));
                store_narrow(key + other, here, _mm512_add_ps(load_wide(key + other, here), two));
            }
            for (int64_t column = 2 * half; column < dim; column += kLanes) {
                const __mmask16 here = first_lanes(dim - column);
                const __m512 sum = _mm512_maskz_loadu_ps(here, key_sum + column);
                store_narrow(key + column, here, _mm512_add_ps(load_wide(key + column, here), sum));
            }
        }
    }
}
}
