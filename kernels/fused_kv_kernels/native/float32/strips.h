// Query rows of float32 attention, transposed: the lanes of a register are rows.
//
// The query heads that share a key head are folded into rows, side by side. A strip has as many folded rows as a
// product has columns. Its scores are [keys][rows], so the softmax compares and adds whole registers, and a row's
// result does not depend on the rows beside it.
#pragma once

#include "products.h"
#include "scoring.h"

#include <type_traits>

namespace fkv {

// The query rows of one key head, the first of its query heads, and how rows score.
struct Rows {
    const float *q;
    int64_t head_step, row_step, rows, groups, dim, q_head;
    Scoring scoring;

    int64_t folded() const { return rows * groups; }
    int64_t offset(int64_t row) const { return row % groups * head_step + row / groups * row_step; }
    int64_t first(int64_t row) const { return scoring.first(row / groups); }
    int64_t limit(int64_t row) const { return scoring.limit(row / groups); }
    float query_scale() const { return scoring.capped() ? scoring.before_cap() : scoring.after_cap(); }
};

inline int64_t strips_of(int64_t folded) { return (folded + kStrip - 1) / kStrip; }

// queries are [dim][rows] and scaled, the rest [rows]; rows fill whole registers. No row sees a key before `begin_key`
// or from `most` on, and all see those from `all_begun` to `least`.
struct Strip {
    int64_t first, count, registers, begin_key, all_begun, least, most;
    float *queries, *highest, *total;
    int32_t *firsts, *limits;

    static int64_t floats(int64_t dim) { return (dim + 4) * kStrip; }
    int64_t width() const { return registers * kLanes; }

    void begin(const Rows &rows, int64_t number, float *memory) {
        first = number * kStrip;
        count = std::min(kStrip, rows.folded() - first);
        registers = (count + kLanes - 1) / kLanes;
        queries = memory;
        total = queries + rows.dim * width();
        highest = total + width();
        limits = reinterpret_cast<int32_t *>(highest + width());
        firsts = limits + width();
        begin_key = rows.first(first);
        all_begun = rows.first(first + count - 1);
        least = rows.limit(first);
        most = rows.limit(first + count - 1);
        std::fill(queries, highest, 0.0f);
        std::fill(highest, highest + width(), kMinusInfinity);
        std::fill(limits, limits + width(), static_cast<int32_t>(most));
        std::fill(firsts, firsts + width(), static_cast<int32_t>(begin_key));
        const float scale = rows.query_scale();
        for (int64_t row = 0; row < count; ++row) {
            const float *source = rows.q + rows.offset(first + row);
            for (int64_t i = 0; i < rows.dim; ++i) queries[i * width() + row] = source[i] * scale;
            limits[row] = static_cast<int32_t>(rows.limit(first + row));
            firsts[row] = static_cast<int32_t>(rows.first(first + row));
        }
    }
};

// Caps scores over `width` keys.
template <int Registers> inline void cap(const Scoring &scoring, int64_t width, float *scores) {
    for (int64_t at = 0; at < width * Registers * kLanes; at += kLanes)
        store_floats(scores + at, tanh_lanes(load_floats(scores + at)) * scoring.after_cap());
}

// Hides those of the keys [start, start + width) that a row does not see, and returns the highest scores so far.
template <int Registers>
inline void hide(const Strip &strip, int64_t start, int64_t width, float *scores, Lanes (&highest)[Registers]) {
    WholeLanes firsts[Registers], limits[Registers];
    for (int part = 0; part < Registers; ++part) {
        highest[part] = load_floats(strip.highest + part * kLanes);
        limits[part] = load_whole(strip.limits + part * kLanes);
        firsts[part] = load_whole(strip.firsts + part * kLanes);
    }
    const int64_t seen_by_all = std::clamp<int64_t>(strip.least - start, 0, width);
    const int64_t begun_for_all = std::clamp<int64_t>(strip.all_begun - start, 0, width);
    for (int64_t key = 0; key < width; ++key) {
        const int32_t position = static_cast<int32_t>(start + key);
        const bool for_all = key >= begun_for_all && key < seen_by_all;
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) {
            float *at = scores + (key * Registers + part) * kLanes;
            Lanes score = load_floats(at);
            if (!for_all) {
                score = (limits[part] > position) & (firsts[part] <= position) ? score : splat(kMinusInfinity);
                store_floats(at, score);
            }
            highest[part] = larger(highest[part], score);
        }
    }
}

// Turns scores into powers of two above the highest, adds them up, and corrects what was added before for the highest
// having changed; `factor`, if given, is what that was multiplied by.
template <int Registers>
inline void weigh(Strip &strip, int64_t width, float *scores, const Lanes (&highest)[Registers], float *factor) {
    Lanes sum[Registers], base[Registers];
    for (int part = 0; part < Registers; ++part) {
        sum[part] = Lanes{};
        // A row that has seen nothing yet has no highest score to subtract.
        base[part] = highest[part] > kMinusInfinity ? highest[part] : Lanes{};
    }
    for (int64_t key = 0; key < width; ++key)
#pragma GCC unroll 4
        for (int part = 0; part < Registers; ++part) {
            float *at = scores + (key * Registers + part) * kLanes;
            const Lanes weight = exp2_lanes(load_floats(at) - base[part]);
            store_floats(at, weight);
            sum[part] += weight;
        }
    for (int part = 0; part < Registers; ++part) {
        float *before = strip.highest + part * kLanes, *total = strip.total + part * kLanes;
        const Lanes change = exp2_lanes(load_floats(before) - base[part]);
        if (factor) store_floats(factor + part * kLanes, change);
        store_floats(before, highest[part]);
        store_floats(total, multiply_add(load_floats(total), change, sum[part]));
    }
}

// Calls a function with the number of registers of a strip, as a constant.
template <int Registers = kStripRegisters, typename Function>
inline void with_registers(const Strip &strip, const Function &function) {
    if constexpr (Registers > 0) {
        if (strip.registers == Registers)
            function(std::integral_constant<int, Registers>{});
        else
            with_registers<Registers - 1>(strip, function);
    }
}

} // namespace fkv
