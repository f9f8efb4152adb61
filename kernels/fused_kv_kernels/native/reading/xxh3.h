// XXH3 with 64 bits, no seed and its default secret, of at least 256 bytes in segments of whole stripes: what the
// published description of the algorithm says about long inputs.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fkv {

constexpr int64_t kStripe = 64, kStripesInBlock = 16;
// The processor's own prefetching stops at the end of every page.
constexpr int64_t kAhead = 1024;

// The algorithm's constants.
alignas(64) constexpr uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
constexpr uint64_t kPrime32[3] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[5] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                  0x27D4EB2F165667C5};

inline uint64_t word(const void *from) {
    uint64_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline const char *secret_at(int64_t offset) { return reinterpret_cast<const char *>(kSecret) + offset; }

// Eight sums that take one stripe after another.
class Sums {
  public:
    Sums() {
        const uint64_t first[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                   kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
        std::memcpy(sums_, first, sizeof sums_);
    }

#if defined(__AVX512F__)
    void add(const char *data, int64_t stripes, const char *secret) {
        __m512i sums = _mm512_load_si512(sums_);
        for (int64_t i = 0; i < stripes; ++i) {
            __builtin_prefetch(data + i * kStripe + kAhead);
            const __m512i value = _mm512_loadu_si512(data + i * kStripe);
            const __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + i * 8));
            const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
            sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
        }
        _mm512_store_si512(sums_, sums);
    }
#elif defined(__AVX2__)
    void add(const char *data, int64_t stripes, const char *secret) {
        __m256i *places = reinterpret_cast<__m256i *>(sums_);
        __m256i sums[2] = {_mm256_load_si256(places), _mm256_load_si256(places + 1)};
        for (int64_t i = 0; i < stripes; ++i) {
            __builtin_prefetch(data + i * kStripe + kAhead);
            for (int half = 0; half < 2; ++half) {
                const char *at = data + i * kStripe + half * 32, *key = secret + i * 8 + half * 32;
                const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
                const __m256i mixed =
                    _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key)));
                const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                sums[half] = _mm256_add_epi64(sums[half],
                                              _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4E)));
            }
        }
        _mm256_store_si256(places, sums[0]);
        _mm256_store_si256(places + 1, sums[1]);
    }
#else
    void add(const char *data, int64_t stripes, const char *secret) {
        for (int64_t i = 0; i < stripes; ++i) {
            for (int lane = 0; lane < 8; ++lane) {
                const uint64_t value = word(data + i * kStripe + lane * 8);
                const uint64_t mixed = value ^ word(secret + i * 8 + lane * 8);
                sums_[lane ^ 1] += value;
                sums_[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
            }
        }
    }
#endif

    void scramble() {
        for (int lane = 0; lane < 8; ++lane) {
            sums_[lane] ^= sums_[lane] >> 47;
            sums_[lane] ^= word(secret_at(128 + lane * 8));
            sums_[lane] *= kPrime32[0];
        }
    }

    uint64_t merged(uint64_t nbytes) const {
        uint64_t result = nbytes * kPrime64[0];
        for (int pair = 0; pair < 4; ++pair) {
            const char *key = secret_at(11 + 16 * pair);
            const auto product = static_cast<unsigned __int128>(sums_[2 * pair] ^ word(key)) *
                                 (sums_[2 * pair + 1] ^ word(key + 8));
            result += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
        }
        result = (result ^ (result >> 37)) * 0x165667919E3779F9;
        return result ^ (result >> 32);
    }

  private:
    alignas(64) uint64_t sums_[8];
};

// Segments of multiples of 64 bytes each, 256 in all at least.
inline uint64_t hash_segments(const iovec *segments, int64_t count) {
    Sums sums;
    int64_t done = 0, nbytes = 0;
    for (int64_t i = 0; i < count; ++i) nbytes += segments[i].iov_len;
    const int64_t all_but_last = nbytes / kStripe - 1;
    const char *last = nullptr;
    for (int64_t i = 0; i < count; ++i) {
        const char *data = static_cast<const char *>(segments[i].iov_base), *end = data + segments[i].iov_len;
        if (data < end) last = end - kStripe;
        while (data < end && done < all_but_last) {
            const int64_t in_block = done % kStripesInBlock;
            int64_t stripes = kStripesInBlock - in_block;
            if (stripes > (end - data) / kStripe) stripes = (end - data) / kStripe;
            if (stripes > all_but_last - done) stripes = all_but_last - done;
            sums.add(data, stripes, secret_at(8 * in_block));
            data += stripes * kStripe;
            done += stripes;
            if (in_block + stripes == kStripesInBlock) sums.scramble();
        }
    }
    sums.add(last, 1, secret_at(192 - 64 - 7));
    return sums.merged(nbytes);
}

}  // namespace fkv
