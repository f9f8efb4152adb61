// The same products on AMX: 16 x 16 results from tiles of 16 rows by 32 bfloat16.
//
// A tile takes the packed layouts of tiles.h as they are. FKV_EMULATE_TILES replaces the instructions by plain loops,
// so that the blocking can be tested on processors without AMX.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__) || defined(FKV_EMULATE_TILES)
#define FKV_MATRIX_TILES 1
#else
#define FKV_MATRIX_TILES 0
#endif

#if FKV_MATRIX_TILES

#ifdef FKV_EMULATE_TILES
namespace fkv {
alignas(64) inline thread_local uint32_t emulated[8][16][16];

inline void emulated_load(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < 16; ++row)
        std::memcpy(emulated[tile][row], static_cast<const char *>(from) + row * stride, 64);
}
inline void emulated_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char *>(to) + row * stride, emulated[tile][row], 64);
}
inline float half_of(uint32_t word, int high) {
    const uint32_t wide = high ? word & 0xffff0000u : word << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
inline void emulated_product(int sum, int left, int right) {
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 16; ++column) {
            float value;
            std::memcpy(&value, &emulated[sum][row][column], sizeof value);
            for (int pair = 0; pair < 16; ++pair)
                for (int high = 0; high < 2; ++high)
                    value += half_of(emulated[left][row][pair], high) * half_of(emulated[right][pair][column], high);
            std::memcpy(&emulated[sum][row][column], &value, sizeof value);
        }
}
} // namespace fkv
#define FKV_TILE_LOAD(tile, from, stride) fkv::emulated_load(tile, from, stride)
#define FKV_TILE_STORE(tile, to, stride) fkv::emulated_store(tile, to, stride)
#define FKV_TILE_ZERO(tile) std::memset(fkv::emulated[tile], 0, sizeof fkv::emulated[tile])
#define FKV_TILE_PRODUCT(sum, left, right) fkv::emulated_product(sum, left, right)
#else
#include <sys/syscall.h>
#include <unistd.h>
#define FKV_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define FKV_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define FKV_TILE_ZERO(tile) _tile_zero(tile)
#define FKV_TILE_PRODUCT(sum, left, right) _tile_dpbf16ps(sum, left, right)
#endif

namespace fkv {

// Whether the kernel lets this process use tiles: their state is large and has to be asked for once.
inline bool tiles_allowed() {
#ifdef FKV_EMULATE_TILES
    return true;
#else
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
#endif
}

// Tiles of the calling thread, configured from construction to destruction: all eight of 16 rows by 64 bytes.
class TileState {
  public:
    explicit TileState(bool wanted) : active_(wanted && tiles_allowed()) {
#ifndef FKV_EMULATE_TILES
        if (!active_) return;
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.row_bytes[tile] = 64;
            config.rows[tile] = 16;
        }
        _tile_loadconfig(&config);
#endif
    }
    ~TileState() {
#ifndef FKV_EMULATE_TILES
        if (active_) _tile_release();
#endif
    }
    TileState(const TileState &) = delete;
    TileState &operator=(const TileState &) = delete;
    bool active() const { return active_; }

  private:
    bool active_;
};

// C = A B, or C = C * factor + A B, for 32 rows, a multiple of 32 columns and a multiple of 16 pairs.
inline void tile_product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float *c,
                         int64_t ldc, const float *factor, int64_t columns) {
    if (factor)
        for (int64_t row = 0; row < 32; ++row) {
            const __m512 scale = _mm512_set1_ps(factor[row]);
            for (int64_t column = 0; column < columns; column += kLanes)
                _mm512_storeu_ps(c + row * ldc + column,
                                 _mm512_mul_ps(_mm512_loadu_ps(c + row * ldc + column), scale));
        }
    for (int64_t column = 0; column < columns; column += 32) {
        float *corner = c + column;
        if (factor) {
            FKV_TILE_LOAD(0, corner, ldc * 4);
            FKV_TILE_LOAD(1, corner + 16, ldc * 4);
            FKV_TILE_LOAD(2, corner + 16 * ldc, ldc * 4);
            FKV_TILE_LOAD(3, corner + 16 * ldc + 16, ldc * 4);
        } else {
            FKV_TILE_ZERO(0);
            FKV_TILE_ZERO(1);
            FKV_TILE_ZERO(2);
            FKV_TILE_ZERO(3);
        }
        for (int64_t pair = 0; pair < pairs; pair += 16) {
            FKV_TILE_LOAD(4, a + pair, lda * 4);
            FKV_TILE_LOAD(5, a + 16 * lda + pair, lda * 4);
            FKV_TILE_LOAD(6, b + pair * ldb + column, ldb * 4);
            FKV_TILE_LOAD(7, b + pair * ldb + column + 16, ldb * 4);
            FKV_TILE_PRODUCT(0, 4, 6);
            FKV_TILE_PRODUCT(1, 4, 7);
            FKV_TILE_PRODUCT(2, 5, 6);
            FKV_TILE_PRODUCT(3, 5, 7);
        }
        FKV_TILE_STORE(0, corner, ldc * 4);
        FKV_TILE_STORE(1, corner + 16, ldc * 4);
        FKV_TILE_STORE(2, corner + 16 * ldc, ldc * 4);
        FKV_TILE_STORE(3, corner + 16 * ldc + 16, ldc * 4);
    }
}

} // namespace fkv

#else

namespace fkv {
class TileState {
  public:
    explicit TileState(bool) {}
    static constexpr bool active() { return false; }
};
inline void tile_product(const uint32_t *, int64_t, const uint32_t *, int64_t, int64_t, float *, int64_t, const float *,
                         int64_t) {}
} // namespace fkv

#endif
