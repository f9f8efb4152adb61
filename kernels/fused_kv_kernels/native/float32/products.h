// Products of float32 matrices in registers.
//
// The right operand is dense, [inner][columns], and its columns fill one to kStripRegisters registers. The left operand
// is read in place, one number at a time, so keys and values need no packing.
#pragma once

#include "vectors.h"

namespace fkv {

#if defined(__AVX512F__)
constexpr int kStripRegisters = 4, kAccumulators = 24; // with right operands and a broadcast, 29 of 32 registers
#else
constexpr int kStripRegisters = 2, kAccumulators = 12; // 15 of 16
#endif
constexpr int64_t kStrip = kStripRegisters * kLanes;

// The left operand's number (row, i) is at from[row * row_step + i * inner_step].
struct Left {
    const float *from;
    int64_t row_step, inner_step;
    Left after(int64_t rows) const { return {from + rows * row_step, row_step, inner_step}; }
};

// C = A B, or C = C * factor + A B with one factor a column; C is dense.
template <int Rows, int Registers>
inline void register_tile(Left a, const float *b, int64_t inner, float *c, const float *factor) {
    Lanes sum[Rows][Registers];
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) sum[row][part] = Lanes{};
    for (int64_t i = 0; i < inner; ++i) {
        Lanes right[Registers];
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) right[part] = load_floats(b + (i * Registers + part) * kLanes);
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row) {
            const Lanes left = splat(a.from[row * a.row_step + i * a.inner_step]);
#pragma GCC unroll 4
            for (int part = 0; part < Registers; ++part)
                sum[row][part] = multiply_add(left, right[part], sum[row][part]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) {
            float *at = c + (row * Registers + part) * kLanes;
            const Lanes added = sum[row][part];
            store_floats(at, factor ? multiply_add(load_floats(at), load_floats(factor + part * kLanes), added) : added);
        }
}

// The rows that are left over: as many as `rows`, which is at most Rows.
template <int Rows, int Registers>
inline void last_tile(int64_t rows, Left a, const float *b, int64_t inner, float *c, const float *factor) {
    if constexpr (Rows > 0) {
        if (rows == Rows)
            register_tile<Rows, Registers>(a, b, inner, c, factor);
        else
            last_tile<Rows - 1, Registers>(rows, a, b, inner, c, factor);
    }
}

template <int Registers>
inline void product(int64_t rows, Left a, const float *b, int64_t inner, float *c, const float *factor) {
    constexpr int kRows = std::min(kAccumulators / Registers, 12);
    constexpr int64_t kColumns = Registers * kLanes;
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows)
        register_tile<kRows, Registers>(a.after(row), b, inner, c + row * kColumns, factor);
    last_tile<kRows - 1, Registers>(rows - row, a.after(row), b, inner, c + row * kColumns, factor);
}

} // namespace fkv
