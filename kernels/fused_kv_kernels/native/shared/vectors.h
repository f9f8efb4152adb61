// Vector registers of float32 through the compiler's vector extensions: one source for AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fkv {

#if defined(__AVX512F__)
constexpr int kLanes = 16; // float32 lanes of a register
#else
constexpr int kLanes = 8;
#endif
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef int32_t WholeLanes __attribute__((vector_size(kLanes * 4)));
typedef float LooseLanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t LooseWholeLanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline Lanes splat(float value) { return value - Lanes{}; }
inline Lanes load_floats(const float *from) { return *reinterpret_cast<const LooseLanes *>(from); }
inline WholeLanes load_whole(const int32_t *from) { return *reinterpret_cast<const LooseWholeLanes *>(from); }
inline void store_floats(float *to, Lanes value) { *reinterpret_cast<LooseLanes *>(to) = value; }
inline void store_whole(int32_t *to, WholeLanes value) { *reinterpret_cast<LooseWholeLanes *>(to) = value; }
inline Lanes in_floats(WholeLanes whole) { return __builtin_convertvector(whole, Lanes); }

// The first `count` lanes, all of them from kLanes on: what is loaded is zero elsewhere, what is stored leaves the
// rest as it is. Of numbers that cannot be compared, `larger` and `smaller` return the second. `multiply_add` rounds
// once: left to itself, a compiler fuses a * b + c here and not there, and a row's last bit depends on its company.
#if defined(__AVX512F__)
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes widened(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
typedef __mmask16 Mask;
inline Mask first_lanes(int64_t count) {
    return static_cast<Mask>(count >= kLanes ? 0xffffu : (1u << std::max<int64_t>(count, 0)) - 1u);
}
inline Lanes load_floats(const float *from, Mask here) { return _mm512_maskz_loadu_ps(here, from); }
inline void store_floats(float *to, Mask here, Lanes value) { _mm512_mask_storeu_ps(to, here, value); }
inline Lanes chosen(Mask where, Lanes value, Lanes otherwise) { return _mm512_mask_mov_ps(otherwise, where, value); }
inline float largest_lane(Lanes value) { return _mm512_reduce_max_ps(value); }
#else
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes widened(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
typedef WholeLanes Mask;
inline Mask first_lanes(int64_t count) {
    return WholeLanes{0, 1, 2, 3, 4, 5, 6, 7} < static_cast<int32_t>(std::clamp<int64_t>(count, 0, kLanes));
}
inline Lanes load_floats(const float *from, Mask here) { return _mm256_maskload_ps(from, (__m256i)here); }
inline void store_floats(float *to, Mask here, Lanes value) { _mm256_maskstore_ps(to, (__m256i)here, value); }
inline Lanes chosen(Mask where, Lanes value, Lanes otherwise) { return where ? value : otherwise; }
inline float largest_lane(Lanes value) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#endif

// Memory that is wanted soon, brought nearer part by part while something else is computed.
struct Coming {
    const char *at = nullptr, *end = nullptr;
    int64_t part = 0;

    Coming() = default;
    // All of it after so many calls of fetch().
    Coming(const void *from, int64_t bytes, int64_t calls)
        : at(static_cast<const char *>(from)), end(at + bytes), part(round_up(bytes, 64 * calls) / calls) {}
    void fetch() {
        const char *const until = std::min(at + part, end);
        for (; at < until; at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Numbers of neighbouring lanes change places.
inline Lanes neighbours(Lanes value) {
#if defined(__AVX512F__)
    return _mm512_permute_ps(value, 0xb1);
#else
    return _mm256_permute_ps(value, 0xb1);
#endif
}

// The first half of the lanes, each twice.
inline Lanes twice(Lanes value) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), value);
#else
    return _mm256_permutevar8x32_ps(value, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
#endif
}

inline Lanes load_bytes(const int8_t *from, int64_t count) {
    __m128i bytes = _mm_setzero_si128();
    if (count >= kLanes)
        std::memcpy(&bytes, from, kLanes);
    else
        std::memcpy(&bytes, from, std::max<int64_t>(count, 0));
    return widened(bytes);
}

// Stores the lowest byte of each of the first `count` numbers.
inline void store_bytes(void *to, WholeLanes whole, int64_t count) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)whole);
#else
    // Four of them in each half of the register.
    const __m256i fours = _mm256_shuffle_epi8((__m256i)whole, _mm256_set1_epi32(0x0c080400));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
#endif
    if (count >= kLanes)
        std::memcpy(to, &bytes, kLanes);
    else
        std::memcpy(to, &bytes, std::max<int64_t>(count, 0));
}

inline float sum_lanes(Lanes value) {
    float sums[kLanes];
    store_floats(sums, value);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
}

inline Lanes absolute(Lanes value) { return (Lanes)((WholeLanes)value & 0x7fffffff); }

// The largest magnitude of `dim` numbers that read(column) gives by lanes, and zero behind them; not a number if one of
// them is not finite.
template <typename Read> inline float largest_magnitude(int64_t dim, const Read &read) {
    Lanes most{}, sums{};
    for (int64_t column = 0; column < dim; column += kLanes) {
        const Lanes value = absolute(read(column));
        most = larger(most, value); // forgets what it has when it meets what is not a number
        sums += value;
    }
    float parts[kLanes], largest = 0.0f;
    store_floats(parts, most);
    for (const float part : parts) largest = std::max(largest, part);
    const float total = sum_lanes(sums);
    return largest + (total - total);
}

// 2^whole for whole numbers of -127 (zero) to 127.
inline Lanes power_of_two(WholeLanes whole) { return (Lanes)((whole + 127) << 23); }

// Added to 1.5 * 2^23, a number is rounded to a whole one, which then stands in the last bits.
constexpr float kRounding = 12582912.0f;
inline WholeLanes whole_part(Lanes shifted) { return (WholeLanes)shifted - 0x4b400000; }

// 2^x for x <= 0, relative error below 2e-7; zero below -126.5, and what is not a number stays that.
inline Lanes exp2_lanes(Lanes x) {
    x = larger(splat(-127.0f), x);
    const Lanes shifted = x + kRounding, part = x - (shifted - kRounding);
    Lanes value = splat(1.535336e-4f);
    for (const float factor : {1.3398875e-3f, 9.618437e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.931472e-1f, 1.0f})
        value = multiply_add(value, part, splat(factor));
    return value * power_of_two(whole_part(shifted));
}

// e^x, relative error below 2e-7; infinite where x is too large, zero where it is too small.
inline Lanes exp_lanes(Lanes x) {
    x = smaller(splat(105.0f), larger(splat(-105.0f), x));
    const Lanes shifted = multiply_add(x, splat(1.44269504f), splat(kRounding)), whole = shifted - kRounding;
    const Lanes part = (x - whole * 0.693145752f) - whole * 1.42860677e-6f; // ln 2 in two parts
    Lanes value = splat(1.3814466e-3f);
    for (const float factor : {8.368781e-3f, 4.1668393e-2f, 0.1666652f, 0.49999994f, 1.0f, 1.0f})
        value = multiply_add(value, part, splat(factor));
    // The power may be out of a float32's range where the result is not: in two steps.
    const WholeLanes power = whole_part(shifted), first = power >> 1;
    return value * power_of_two(first) * power_of_two(power - first);
}

// tanh x, relative error below 3e-7; what is not a number stays that.
inline Lanes tanh_lanes(Lanes x) {
    const Lanes power = smaller(splat(60.0f), larger(splat(-60.0f), x * 2.88539008f)); // e^(2 x) = 2^power
    const Lanes shifted = power + kRounding, part = power - (shifted - kRounding);
    Lanes growth = splat(1.5395326e-4f); // 2^part - 1, which keeps what is small exact, divided by the part
    for (const float factor : {1.3390719e-3f, 9.618263e-3f, 5.5503575e-2f, 2.402265e-1f, 6.931472e-1f})
        growth = multiply_add(growth, part, splat(factor));
    const Lanes whole = power_of_two(whole_part(shifted)), less = growth * part * whole + (whole - 1.0f);
    return less / (less + 2.0f);
}

} // namespace fkv
