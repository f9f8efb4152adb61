// Row attention on AVX512-BF16, and AMX where there is one: scattered query rows, each with its own causal limit and
// window, one pass over the keys.
//
// The query heads that share a key head are folded into rows. Keys and values of a head are packed once. Each block of
// rows then processes the key blocks from its first row's window up to its last row with a running maximum and sum
// (online softmax), so the scores stay in the first-level cache and are not rounded to bfloat16 before the softmax.
#include "folded.h"
#include "matrix_tiles.h"
#include "row_softmax.h"

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = FKV_MATRIX_TILES ? 32 : 24; // four register tiles, or two matrix tiles

// `padded` columns of values, and the panels of a head.
struct Shape {
    int64_t batch, q_heads, kv_heads, rows, keys, dim, value_dim, groups, padded, panels;

    explicit Shape(const int64_t *s)
        : batch(s[0]), q_heads(s[1]), kv_heads(s[2]), rows(s[3]), keys(s[4]), dim(s[5]), value_dim(s[6]),
          groups(q_heads / kv_heads), padded(round_up(value_dim, kLanes)), panels(round_up(keys, kPanel) / kPanel) {}
    int64_t heads() const { return batch * kv_heads; }
    int64_t key_words() const { return kPanel * dim / 2; } // of a panel
    int64_t value_words() const { return kPanel / 2 * padded; }
};

// Packed keys and values: panel after panel, head after head.
struct Packed {
    uint32_t *keys, *values;
};

struct Operands {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    Strides q_steps, k_steps, v_steps, out_steps;
};

// Packs 64 keys and values of one head. `origin` keys before all windows are left out.
void pack(const Shape &s, const Operands &x, const Packed &packed, int64_t origin, int64_t head, int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, s.keys - origin - first);
    const int64_t batch = head / s.kv_heads, kv_head = head % s.kv_heads, step = x.v_steps.of[2];
    const uint16_t *keys = x.k + x.k_steps.at(batch, kv_head, origin + first);
    const uint16_t *values = x.v + x.v_steps.at(batch, kv_head, origin + first);
    uint32_t *pairs = packed.values + (head * s.panels + panel) * s.value_words();
    pack_keys(keys, x.k_steps.of[2], count, s.dim, packed.keys + (head * s.panels + panel) * s.key_words());
    for (int64_t row = 0; row < count; row += 2, pairs += s.padded)
        pack_value_pair(values + row * step, row + 1 < count ? values + (row + 1) * step : nullptr, s.value_dim,
                        s.padded, pairs);
    std::memset(pairs, 0, (kPanel / 2 - (count + 1) / 2) * s.padded * 4);
}

void begin_rows(const Shape &s, const Operands &x, const Scoring &scoring, int64_t origin, int64_t head, int64_t first,
                int64_t count, Workspace &space) {
    Folded at(s.kv_heads, s.groups, head, first);
    for (int64_t row = 0; row < count; ++row, at.step()) {
        std::memcpy(space.queries.data() + row * s.dim / 2, x.q + x.q_steps.at(at.batch, at.q_head, at.row), s.dim * 2);
        space.firsts[row] = scoring.first(at.row) - origin;
        space.limits[row] = scoring.limit(at.row) - origin;
        space.maximum[row] = kMinusInfinity;
    }
    std::fill(space.sums.begin(), space.sums.end(), 0.0f);
    std::fill(space.total.begin(), space.total.end(), 0.0f);
}

// Folds the keys [start, start + width) of a head into the sums of `count` rows.
template <bool Windows>
void attend(const Shape &s, const Scoring &scoring, const uint32_t *keys, const uint32_t *values, int64_t start,
            int64_t width, int64_t count, bool tiles, Workspace &space) {
    for (int64_t at = 0; at < width; at += kPanel) {
        const uint32_t *panel = keys + (start + at) / kPanel * s.key_words();
        if (tiles)
            tile_product(space.queries.data(), s.dim / 2, panel, kPanel, s.dim / 2, space.scores.data() + at, kKeyBlock,
                         nullptr, kPanel);
        else
            product(space.queries.data(), s.dim / 2, panel, kPanel, s.dim / 2, space.scores.data() + at, kKeyBlock,
                    nullptr, count, kPanel);
    }
    if (scoring.capped()) cap_scores(space.scores.data(), count, kKeyBlock, width, scoring.before_cap());
    Seen seen[kRowBlock];
    for (int64_t row = 0; row < count; ++row) {
        const int64_t limit = std::clamp<int64_t>(space.limits[row] - start, 0, width);
        seen[row] = {std::clamp<int64_t>(space.firsts[row] - start, 0, limit), limit};
        space.highest[row] = highest_score<Windows>(space.scores.data() + row * kKeyBlock, seen[row]);
    }
    rescale(space, count, scoring.after_cap());
    for (int64_t row = 0; row < count; ++row) weigh<Windows>(space, row, seen[row], scoring.after_cap());
    const uint32_t *pairs = values + start / 2 * s.padded;
    if (tiles)
        tile_product(space.weights.data(), kKeyBlock / 2, pairs, s.padded, round_up(width, 32) / 2,
                     space.sums.data(), s.padded, space.factor.data(), s.padded);
    else
        product(space.weights.data(), kKeyBlock / 2, pairs, s.padded, (width + 1) / 2, space.sums.data(), s.padded,
                space.factor.data(), count, s.padded);
}

void write_rows(const Shape &s, const Operands &x, const Scoring &scoring, int64_t head, int64_t first, int64_t count,
                const Workspace &space) {
    Folded at(s.kv_heads, s.groups, head, first);
    for (int64_t row = 0; row < count; ++row, at.step()) {
        uint16_t *target = x.out + x.out_steps.at(at.batch, at.q_head, at.row);
        const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(space.total.data() + row * kLanes));
        const __m512 share = _mm512_set1_ps(1.0f / (total + scoring.sink_weight(at.q_head, space.maximum[row])));
        for (int64_t column = 0; column < s.value_dim; column += kLanes) {
            const __m512 sum = _mm512_loadu_ps(space.sums.data() + row * s.padded + column);
            _mm256_mask_storeu_epi16(target + column, first_lanes(s.value_dim - column),
                                     (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum, share)));
        }
    }
}

} // namespace

extern "C" {

// Bytes of scratch that fkv_row_attention wants: the packed keys and values.
int64_t fkv_row_attention_scratch(const int64_t *shape, int) {
    const Shape s(shape);
    return s.heads() * s.panels * (s.key_words() + s.value_words()) * 4;
}

// q [B, Hq, R, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] and out [B, Hq, R, Dv], each by three strides (batch, head, row;
// elements; the last dimension is dense). positions int64 [R], ascending; first_keys int64 [R], not descending, or none;
// sinks float32 [Hq], or none. Products are multiplied by `scale`; a softcap of zero is none.
void fkv_row_attention(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, const int64_t *positions,
                       const int64_t *first_keys, const float *sinks, uint32_t *scratch, const int64_t *shape,
                       const int64_t *strides, float scale, float softcap, int threads) {
    const Shape s(shape);
    const Scoring scoring{positions, first_keys, sinks, scale, softcap};
    const Operands x{q, k, v, out, {strides}, {strides + 3}, {strides + 6}, {strides + 9}};
    const Packed packed{scratch, scratch + s.heads() * s.panels * s.key_words()};
    const int64_t folded = s.rows * s.groups, blocks = (folded + kRowBlock - 1) / kRowBlock;
    const int64_t origin = scoring.first(0), panels = round_up(s.keys - origin, kPanel) / kPanel;

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.heads() * panels; ++task)
            pack(s, x, packed, origin, task / panels, task % panels);
        Workspace space(kRowBlock, s.dim, s.padded);
        const TileState tiles(s.dim % 32 == 0 && s.value_dim % 32 == 0);
        // The last rows see most keys: they come first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.heads() * blocks; ++task) {
            const int64_t head = task % s.heads(), first = (blocks - 1 - task / s.heads()) * kRowBlock;
            const int64_t count = std::min(kRowBlock, folded - first);
            begin_rows(s, x, scoring, origin, head, first, count, space);
            const uint32_t *keys = packed.keys + head * s.panels * s.key_words();
            const uint32_t *values = packed.values + head * s.panels * s.value_words();
            const int64_t end = space.limits[count - 1];
            for (int64_t start = space.firsts[0] / kPanel * kPanel; start < end; start += kKeyBlock)
                (first_keys ? attend<true> : attend<false>)(s, scoring, keys, values, start,
                                                            std::min(kKeyBlock, end - start), count, tiles.active(),
                                                            space);
            write_rows(s, x, scoring, head, first, count, space);
        }
    }
}
}
