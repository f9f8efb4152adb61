// Row attention in eight bits: scattered query rows, each with its own causal limit and window, for results that only
// correct others.
//
// Queries are rounded by row, keys by key after their mean is subtracted, which changes no softmax and takes away what
// all keys of a head share (SageAttention, Zhang et al. 2024). Weights are relative to the highest of their
// row in a panel of 64 keys: relative to the row's highest, an attention sink would leave nothing of the others. Values
// are rounded by column and panel. Sums are whole numbers within a panel, and float32 from panel to panel.
#include "element.h"
#include "eight_bit_tiles.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include <vector>

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = 48;
constexpr int64_t kMeanKeys = 256; // of so many keys, evenly spaced, the mean is taken
constexpr float kLowest = -1e30f;  // below every score
constexpr float kNothing = 1e-30f; // the largest magnitude of zeros

// The first key, an attention sink in most models, is a panel of its own.
int64_t panel_of(int64_t key) { return (key + kBytePanel - 1) / kBytePanel; }
int64_t first_of(int64_t panel) { return panel ? (panel - 1) * kBytePanel + 1 : 0; }

struct Shape {
    int64_t batch, q_heads, kv_heads, rows, keys, dim, value_dim, groups, words, padded, panels;

    explicit Shape(const int64_t *s)
        : batch(s[0]), q_heads(s[1]), kv_heads(s[2]), rows(s[3]), keys(s[4]), dim(s[5]), value_dim(s[6]),
          groups(q_heads / kv_heads), words(round_up(dim, kLanes) / 4), padded(round_up(value_dim, kLanes)),
          panels(panel_of(keys - 1) + 1) {}
    int64_t heads() const { return batch * kv_heads; }
    int64_t folded() const { return rows * groups; }
    int64_t panel_floats() const { return kBytePanel * (words + 2) + padded * (kBytePanel / 4 + 1); }
};

// Elements from batch to batch, head to head and row to row.
struct Strides {
    const int64_t *of;
    int64_t at(int64_t batch, int64_t head, int64_t row) const { return batch * of[0] + head * of[1] + row * of[2]; }
};

struct Operands {
    const Element *q, *k, *v;
    Element *out;
    Strides q_steps, k_steps, v_steps, out_steps;
    const int64_t *positions, *first_keys; // no first keys: rows see all keys from the first one on

    int64_t first(int64_t row) const { return first_keys ? first_keys[row] : 0; }
};

// 64 keys and values of a head: words of keys, the sums that queries begin with, scales; words of values, their scales.
struct Panel {
    uint32_t *keys;
    int32_t *begin;
    float *key_scales;
    uint32_t *values;
    float *value_scales;

    Panel(const Shape &s, float *memory)
        : keys(reinterpret_cast<uint32_t *>(memory)), begin(reinterpret_cast<int32_t *>(keys + kBytePanel * s.words)),
          key_scales(reinterpret_cast<float *>(begin + kBytePanel)),
          values(reinterpret_cast<uint32_t *>(key_scales + kBytePanel)),
          value_scales(reinterpret_cast<float *>(values + kBytePanel / 4 * s.padded)) {}
};

// A folded row of a head: the row and the query head that it is of.
struct Folded {
    int64_t batch, q_head, row;
    Folded(const Shape &s, int64_t head, int64_t folded)
        : batch(head / s.kv_heads), q_head(head % s.kv_heads * s.groups + folded % s.groups), row(folded / s.groups) {}
};

// Numbers that begin at a cache line: registers are loaded from one line each.
template <typename Number> class Buffer {
    struct alignas(64) Line {
        Number numbers[64 / sizeof(Number)];
    };
    std::vector<Line> lines;

  public:
    explicit Buffer(int64_t count) : lines((count * sizeof(Number) + 63) / 64) {}
    Number *data() { return lines.data()->numbers; }
    Number &operator[](int64_t at) { return data()[at]; }
    void fill(Number value) { std::fill(data(), data() + lines.size() * (64 / sizeof(Number)), value); }
};

// What 48 folded rows of a head have while they go through the panels.
struct Workspace {
    Buffer<uint32_t> queries, weights;
    Buffer<int32_t> products, weight_sums;
    Buffer<float> sums, total, scales, highest, maximum, kept, added;
    Buffer<int64_t> firsts, limits;

    explicit Workspace(const Shape &s)
        : queries(kRowBlock * s.words), weights(kRowBlock * kBytePanel / 4), products(kByteTileRows * kBytePanel),
          weight_sums(kRowBlock * kLanes), sums(kRowBlock * s.padded), total(kRowBlock * kLanes), scales(kRowBlock),
          highest(kRowBlock), maximum(kRowBlock), kept(kRowBlock), added(kRowBlock), firsts(kRowBlock),
          limits(kRowBlock) {}
};

inline __m128i bytes_of(Lanes value, float factor) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(factor))));
}

// The mean key of a head, from some of its keys.
void mean_key(const Shape &s, const Element *keys, int64_t step, int64_t count, float *mean) {
    const int64_t every = (count + kMeanKeys - 1) / kMeanKeys, taken = (count + every - 1) / every;
    for (int64_t column = 0; column < s.dim; column += kLanes) {
        const Mask here = first_lanes(s.dim - column);
        Lanes sum{};
        for (int64_t key = 0; key < count; key += every) sum += load(keys + key * step + column, here);
        store_floats(mean + column, here, sum * splat(1.0f / static_cast<float>(taken)));
    }
}

// Packs up to 64 keys; returns whether all are finite.
bool pack_keys(const Shape &s, const Element *keys, int64_t step, int64_t count, const float *mean, const Panel &to) {
    float most = 0.0f;
    for (int64_t key = 0; key < kBytePanel; ++key) {
        if (key >= count) {
            for (int64_t word = 0; word < s.words; ++word) to.keys[word * kBytePanel + key] = 0;
            to.key_scales[key] = 0.0f;
            to.begin[key] = 0;
            continue;
        }
        const Element *const source = keys + key * step;
        const auto read = [&](int64_t column) {
            const Mask here = first_lanes(s.dim - column);
            return load(source + column, here) - load_floats(mean + column, here);
        };
        const float found = largest_magnitude(s.dim, read), largest = found < kNothing ? kNothing : found;
        most += found;
        int32_t sum = 0;
        for (int64_t column = 0; column < s.dim; column += kLanes) {
            alignas(16) int8_t bytes[kLanes];
            _mm_store_si128(reinterpret_cast<__m128i *>(bytes), bytes_of(read(column), 127.0f / largest));
            for (const int8_t byte : bytes) sum += byte;
            for (int64_t word = 0; word < kLanes / 4; ++word)
                std::memcpy(to.keys + (column / 4 + word) * kBytePanel + key, bytes + 4 * word, 4);
        }
        to.key_scales[key] = largest / 127.0f;
        to.begin[key] = -128 * sum; // queries are stored with 128 added
    }
    return most - most == 0.0f;
}

void pack_values(const Shape &s, const Element *values, int64_t step, int64_t count, bool finite, const Panel &to) {
    for (int64_t column = 0; column < s.padded; column += kLanes) {
        const Mask here = first_lanes(s.value_dim - column);
        Lanes most = splat(kNothing), sum{};
        for (int64_t key = 0; key < count; ++key) {
            const Lanes value = absolute(load(values + key * step + column, here));
            most = larger(most, value);
            sum += value;
        }
        const Lanes factor = splat(127.0f) / most;
        // What is not finite must not pass for a number.
        store_floats(to.value_scales + column,
                     finite ? multiply_add(most, splat(1.0f / 127.0f), sum - sum) : splat(std::numeric_limits<float>::quiet_NaN()));
        for (int64_t four = 0; four < kBytePanel / 4; ++four) {
            __m512i words = _mm512_setzero_si512();
            for (int64_t i = 0; i < 4 && 4 * four + i < count; ++i) {
                const Lanes value = load(values + (4 * four + i) * step + column, here) * factor;
                const __m512i whole = _mm512_and_si512(_mm512_cvtps_epi32(value), _mm512_set1_epi32(255));
                words = _mm512_or_si512(words, _mm512_sllv_epi32(whole, _mm512_set1_epi32(static_cast<int>(8 * i))));
            }
            _mm512_storeu_si512(to.values + word_of_keys(four) * s.padded + column, words);
        }
    }
}

void begin_rows(const Shape &s, const Operands &x, int64_t head, int64_t first, int64_t count, Workspace &space) {
    for (int64_t row = 0; row < count; ++row) {
        const Folded at(s, head, first + row);
        const Element *const source = x.q + x.q_steps.at(at.batch, at.q_head, at.row);
        const auto read = [&](int64_t column) { return load(source + column, first_lanes(s.dim - column)); };
        const float found = largest_magnitude(s.dim, read), largest = found < kNothing ? kNothing : found;
        auto *const bytes = reinterpret_cast<uint8_t *>(space.queries.data() + row * s.words);
        for (int64_t column = 0; column < s.dim; column += kLanes)
            _mm_storeu_si128(reinterpret_cast<__m128i *>(bytes + column),
                             _mm_add_epi8(bytes_of(read(column), 127.0f / largest), _mm_set1_epi8(-128)));
        space.scales[row] = largest / 127.0f;
        space.firsts[row] = x.first(at.row);
        space.limits[row] = x.positions[at.row] + 1;
    }
    space.maximum.fill(kLowest);
    space.sums.fill(0.0f);
    space.total.fill(0.0f);
}

// Weights of one row in a panel that begins at key `start`, from its products with the keys; `scale` makes these powers.
inline void weigh_row(const int32_t *products, const Panel &panel, int64_t start, float scale, int64_t row,
                      const BytePowers &powers, Workspace &space) {
    __m512 scores[4];
    Mask seen[4];
    const int64_t limit = std::min(space.limits[row], first_of(panel_of(start) + 1));
    const bool whole = space.firsts[row] <= start && limit == start + kBytePanel;
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
        const int64_t column = part * kLanes, first = start + column;
        const __m512 product = _mm512_cvtepi32_ps(_mm512_loadu_si512(products + column));
        scores[part] = _mm512_mul_ps(product, _mm512_loadu_ps(panel.key_scales + column));
        if (!whole) {
            seen[part] = first_lanes(limit - first) & ~first_lanes(space.firsts[row] - first);
            scores[part] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), seen[part], scores[part]);
        }
    }
    const float most = _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]), _mm512_max_ps(scores[2], scores[3])));
    space.highest[row] = std::max(most * scale, kLowest);
    const __m512 steps = _mm512_set1_ps(scale * BytePowers::kSteps);
    const __m512 top = _mm512_set1_ps(most * scale * BytePowers::kSteps + 1.0f);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
        scores[part] = _mm512_fmsub_ps(scores[part], steps, top);
        // Where a row sees nothing, the highest score is no number to subtract.
        if (!whole) scores[part] = _mm512_mask_mov_ps(_mm512_set1_ps(BytePowers::kNone), seen[part], scores[part]);
    }
    const __m512i weights = powers(scores);
    _mm512_storeu_si512(space.weights.data() + row * kBytePanel / 4, weights);
    _mm512_storeu_si512(space.weight_sums.data() + row * kLanes,
                        _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, _mm512_set1_epi8(1)));
}

// What the rows' sums so far are multiplied by, and what this panel's are; their totals.
inline void rescale(int64_t count, Workspace &space) {
    for (int64_t row = 0; row < count; row += kLanes) {
        const Lanes before = load_floats(space.maximum.data() + row), here = load_floats(space.highest.data() + row);
        const Lanes after = larger(before, here);
        store_floats(space.kept.data() + row, exp2_lanes(before - after));
        store_floats(space.added.data() + row, exp2_lanes(here - after) * splat(1.0f / 255.0f));
        store_floats(space.maximum.data() + row, after);
    }
    for (int64_t row = 0; row < count; ++row) {
        float *const total = space.total.data() + row * kLanes;
        const Lanes found = _mm512_cvtepi32_ps(_mm512_loadu_si512(space.weight_sums.data() + row * kLanes));
        store_floats(total, multiply_add(load_floats(total), splat(space.kept[row]), found * splat(space.added[row])));
    }
}

// Adds the weighted values of a panel to the rows' sums, for 16 * Registers columns.
template <int Registers>
void add_values(const Shape &s, const Panel &panel, int64_t column, int64_t count, Workspace &space) {
    const int64_t words = kBytePanel / 4;
    for (int64_t first = 0; first < count; first += kByteTileRows) {
        const int64_t rows = std::min<int64_t>(kByteTileRows, count - first);
        byte_rows<Registers>(rows, space.weights.data() + first * words, words, panel.values + column, s.padded, words,
                             nullptr, space.products.data());
        for (int64_t row = 0; row < rows; ++row) {
            const Lanes kept = splat(space.kept[first + row]), added = splat(space.added[first + row]);
            float *const sums = space.sums.data() + (first + row) * s.padded + column;
            for (int64_t part = 0; part < Registers; ++part) {
                const Lanes found = _mm512_cvtepi32_ps(
                    _mm512_loadu_si512(space.products.data() + (row * Registers + part) * kLanes));
                const Lanes factor = added * load_floats(panel.value_scales + column + part * kLanes);
                float *const to = sums + part * kLanes;
                store_floats(to, multiply_add(found, factor, load_floats(to) * kept));
            }
        }
    }
}

void attend(const Shape &s, const Panel &panel, int64_t start, float scale, int64_t count, const BytePowers &powers,
            Workspace &space) {
    for (int64_t first = 0; first < count; first += kByteTileRows) {
        const int64_t rows = std::min<int64_t>(kByteTileRows, count - first);
        byte_rows<4>(rows, space.queries.data() + first * s.words, s.words, panel.keys, kBytePanel, s.words,
                     panel.begin, space.products.data());
        for (int64_t row = 0; row < rows; ++row)
            weigh_row(space.products.data() + row * kBytePanel, panel, start, scale * space.scales[first + row],
                      first + row, powers, space);
    }
    rescale(count, space);
    int64_t column = 0;
    for (; column + 4 * kLanes <= s.padded; column += 4 * kLanes) add_values<4>(s, panel, column, count, space);
    switch ((s.padded - column) / kLanes) {
    case 1: add_values<1>(s, panel, column, count, space); break;
    case 2: add_values<2>(s, panel, column, count, space); break;
    case 3: add_values<3>(s, panel, column, count, space); break;
    default: break;
    }
}

void write_rows(const Shape &s, const Operands &x, int64_t head, int64_t first, int64_t count, Workspace &space) {
    for (int64_t row = 0; row < count; ++row) {
        const Folded at(s, head, first + row);
        Element *const to = x.out + x.out_steps.at(at.batch, at.q_head, at.row);
        const float scale = space.scales[row];
        // A query that is not finite has weights all the same.
        const Lanes share = splat(1.0f / sum_lanes(load_floats(space.total.data() + row * kLanes)) + (scale - scale));
        for (int64_t column = 0; column < s.value_dim; column += kLanes)
            store(to + column, first_lanes(s.value_dim - column),
                  load_floats(space.sums.data() + row * s.padded + column) * share);
    }
}

} // namespace
#endif

extern "C" {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// Bytes of scratch that fkv_eight_bit_attention wants: panels, and a mean key for each head.
int64_t fkv_eight_bit_attention_scratch(const int64_t *shape) {
    const Shape s(shape);
    return s.heads() * (s.panels * s.panel_floats() + s.dim) * 4;
}

// q [B, Hq, R, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] and out [B, Hq, R, Dv], each by three strides (batch, head, row;
// elements; the last dimension is dense). positions int64 [R], ascending; first_keys int64 [R], not descending, or none.
// Keys behind the last row are not read.
void fkv_eight_bit_attention(const Element *q, const Element *k, const Element *v, Element *out,
                             const int64_t *positions, const int64_t *first_keys, float *scratch, const int64_t *shape,
                             const int64_t *strides, float scale, int threads) {
    const Shape s(shape);
    const Operands x{q, k, v, out, {strides}, {strides + 3}, {strides + 6}, {strides + 9}, positions, first_keys};
    const int64_t begin = panel_of(x.first(0)), origin = first_of(begin), seen = positions[s.rows - 1] + 1;
    const int64_t panels = panel_of(seen - 1) + 1 - begin;
    const int64_t blocks = (s.folded() + kRowBlock - 1) / kRowBlock;
    float *const means = scratch + s.heads() * s.panels * s.panel_floats();
    const auto panel_at = [&](int64_t head, int64_t panel) {
        return Panel(s, scratch + (head * s.panels + panel) * s.panel_floats());
    };

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t head = 0; head < s.heads(); ++head)
            mean_key(s, k + x.k_steps.at(head / s.kv_heads, head % s.kv_heads, origin), x.k_steps.of[2],
                     seen - origin, means + head * s.dim);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.heads() * panels; ++task) {
            const int64_t head = task / panels, panel = begin + task % panels;
            const int64_t batch = head / s.kv_heads, kv_head = head % s.kv_heads, key = first_of(panel);
            const int64_t count = std::min(first_of(panel + 1), seen) - key;
            const Panel to = panel_at(head, panel);
            const bool finite = pack_keys(s, k + x.k_steps.at(batch, kv_head, key), x.k_steps.of[2], count,
                                          means + head * s.dim, to);
            pack_values(s, v + x.v_steps.at(batch, kv_head, key), x.v_steps.of[2], count, finite, to);
        }
        Workspace space(s);
        const BytePowers powers;
        // The last rows see most keys: they come first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.heads() * blocks; ++task) {
            const int64_t head = task % s.heads(), first = (blocks - 1 - task / s.heads()) * kRowBlock;
            const int64_t count = std::min(kRowBlock, s.folded() - first);
            begin_rows(s, x, head, first, count, space);
            const int64_t last = panel_of(space.limits[count - 1] - 1);
            for (int64_t panel = panel_of(space.firsts[0]); panel <= last; ++panel)
                attend(s, panel_at(head, panel), first_of(panel), scale * 1.44269504f, count, powers, space);
            write_rows(s, x, head, first, count, space);
        }
    }
}

#else

// These instructions are not there: no scratch is enough.
int64_t fkv_eight_bit_attention_scratch(const int64_t *) { return -1; }
void fkv_eight_bit_attention(const void *, const void *, const void *, void *, const int64_t *, const int64_t *, float *,
                             const int64_t *, const int64_t *, float, int) {}

#endif
}
