// Row attention in eight bits: scattered query rows, each with its own causal limit and window, for results that only
// correct others.
//
// Queries are rounded by row, keys by key after their mean is subtracted, which changes no softmax and takes away what
// all keys of a head share (SageAttention, Zhang et al. 2024). Weights are relative to the highest of their row in a
// panel of 64 keys: relative to the row's highest, an attention sink would leave nothing of the others. Values are
// rounded by column and panel. Sums are whole numbers within a panel, and float32 from panel to panel.
#include "element.h"
#include "eight_bit_panels.h"
#include "folded.h"
#include "scoring.h"

#if defined(FKV_HAS_BYTES)
#include <vector>

namespace {

using namespace fkv;

constexpr int64_t kRowBlock = 48;
constexpr float kLowest = -1e30f; // below every score
const WholeLanes kOnes = 0x01010101 - WholeLanes{};

struct Shape {
    int64_t batch, q_heads, kv_heads, rows, keys, groups, panels;
    Packing packing;

    explicit Shape(const int64_t *s)
        : batch(s[0]), q_heads(s[1]), kv_heads(s[2]), rows(s[3]), keys(s[4]), groups(q_heads / kv_heads),
          panels(panel_of(keys - 1) + 1), packing(s[5], s[6]) {}
    int64_t heads() const { return batch * kv_heads; }
    int64_t folded() const { return rows * groups; }
};

struct Operands {
    const Element *q, *k, *v;
    Element *out;
    Strides q_steps, k_steps, v_steps, out_steps;
};

// The memory of all panels, head after head, and then of the heads' mean keys.
struct Packed {
    const Shape &s;
    float *memory;

    Panel panel(int64_t head, int64_t number) const {
        return Panel(s.packing, memory + (head * s.panels + number) * s.packing.panel_floats());
    }
    float *mean(int64_t head) const {
        return memory + s.heads() * s.panels * s.packing.panel_floats() + head * s.packing.dim;
    }
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

// What a block of folded rows of a head has while it goes through the panels. Sums so far are multiplied by `kept`,
// those of a panel by `added`.
struct Workspace {
    Buffer<uint32_t> queries, weights;
    Buffer<int32_t> products, weight_sums;
    Buffer<float> sums, total, scales, highest, maximum, kept, added;
    Buffer<int64_t> firsts, limits;
    BytePowers powers;

    explicit Workspace(const Packing &p)
        : queries(kRowBlock * p.words), weights(kRowBlock * kPanelKeys / 4),
          products(kByteTileRows * std::max<int64_t>(kPanelKeys, p.padded)),
          weight_sums(kRowBlock * kLanes), sums(kRowBlock * p.padded), total(kRowBlock * kLanes), scales(kRowBlock),
          highest(kRowBlock), maximum(kRowBlock), kept(kRowBlock), added(kRowBlock), firsts(kRowBlock),
          limits(kRowBlock) {}
};

void begin_rows(const Shape &s, const Operands &x, const Scoring &scoring, Folded at, int64_t count, Workspace &space) {
    const int64_t dim = s.packing.dim, words = s.packing.words;
    for (int64_t row = 0; row < count; ++row, at.step()) {
        const Element *const source = x.q + x.q_steps.at(at.batch, at.q_head, at.row);
        const auto read = [&](int64_t column) { return load(source + column, first_lanes(dim - column)); };
        const float range = row_range(dim, read);
        auto *const bytes = reinterpret_cast<uint8_t *>(space.queries.data() + row * words);
        for (int64_t column = 0; column < dim; column += kLanes)
            store_bytes(bytes + column, nearest(read(column), splat(kMost / range)) + 128, kLanes);
        space.scales[row] = range / kMost * scoring.after_cap();
        space.firsts[row] = scoring.first(at.row);
        space.limits[row] = scoring.limit(at.row);
    }
    space.maximum.fill(kLowest);
    space.sums.fill(0.0f);
    space.total.fill(0.0f);
}

// Weights of one row in a panel that begins at key `start`, from its products with the keys. A key that the row does
// not see has the score minus infinity, and the weight zero.
inline void weigh_row(const int32_t *products, const Panel &panel, int64_t start, int64_t row, Workspace &space) {
    Lanes scores[kPanelRegisters], highest = splat(kMinusInfinity);
    const int64_t limit = std::min(space.limits[row], first_of(panel_of(start) + 1));
    const bool whole = space.firsts[row] <= start && limit == start + kPanelKeys;
#pragma GCC unroll 8
    for (int part = 0; part < kPanelRegisters; ++part) {
        const int64_t column = part * kLanes, first = start + column;
        scores[part] = in_floats(load_whole(products + column)) * load_floats(panel.key_scales + column);
        if (!whole) {
            const Mask seen = first_lanes(limit - first) & ~first_lanes(space.firsts[row] - first);
            scores[part] = chosen(seen, scores[part], splat(kMinusInfinity));
        }
        highest = larger(highest, scores[part]);
    }
    const float most = largest_lane(highest);
    space.highest[row] = std::max(most * space.scales[row], kLowest);
    const Lanes steps = splat(space.scales[row] * BytePowers::kSteps);
    // Subtracted first, the highest leaves no rounding error, however large scores are.
#pragma GCC unroll 8
    for (int part = 0; part < kPanelRegisters; ++part)
        scores[part] = multiply_add(scores[part] - most, steps, splat(BytePowers::kAhead));
    uint32_t *const weights = space.weights.data() + row * kPanelKeys / 4;
    space.powers(scores, weights);
    WholeLanes sums{};
    for (int64_t word = 0; word < kPanelKeys / 4; word += kLanes)
        sums = add_products(sums, load_whole(reinterpret_cast<const int32_t *>(weights) + word), kOnes);
    store_whole(space.weight_sums.data() + row * kLanes, sums);
}

// Updates the highest scores of the rows, and their totals.
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
        const Lanes found = in_floats(load_whole(space.weight_sums.data() + row * kLanes));
        store_floats(total, multiply_add(load_floats(total), splat(space.kept[row]), found * splat(space.added[row])));
    }
}

// Adds the weighted values of a panel to the rows' sums.
void add_values(const Packing &p, const Panel &panel, int64_t count, Workspace &space) {
    const int64_t words = kPanelKeys / 4;
    for (int64_t first = 0; first < count; first += kByteTileRows) {
        const int64_t rows = std::min<int64_t>(kByteTileRows, count - first);
        byte_product(rows, p.padded, words, {space.weights.data() + first * words, words},
                     {panel.values, p.padded, nullptr}, space.products.data(), p.padded);
        for (int64_t row = 0; row < rows; ++row) {
            const Lanes kept = splat(space.kept[first + row]), added = splat(space.added[first + row]);
            const int32_t *const products = space.products.data() + row * p.padded;
            float *const sums = space.sums.data() + (first + row) * p.padded;
            for (int64_t column = 0; column < p.padded; column += kLanes) {
                const Lanes factor = added * load_floats(panel.value_scales + column);
                const Lanes found = in_floats(load_whole(products + column)) * factor;
                store_floats(sums + column, multiply_add(load_floats(sums + column), kept, found));
            }
        }
    }
}

void attend(const Packing &p, const Panel &panel, int64_t start, int64_t count, Workspace &space) {
    for (int64_t first = 0; first < count; first += kByteTileRows) {
        const int64_t rows = std::min<int64_t>(kByteTileRows, count - first);
        byte_product(rows, kPanelKeys, p.words, {space.queries.data() + first * p.words, p.words},
                     {panel.keys, kPanelKeys, panel.begin}, space.products.data(), kPanelKeys);
        for (int64_t row = 0; row < rows; ++row)
            weigh_row(space.products.data() + row * kPanelKeys, panel, start, first + row, space);
    }
    rescale(count, space);
    add_values(p, panel, count, space);
}

void write_rows(const Packing &p, const Operands &x, Folded at, int64_t count, Workspace &space) {
    for (int64_t row = 0; row < count; ++row, at.step()) {
        Element *const to = x.out + x.out_steps.at(at.batch, at.q_head, at.row);
        const Lanes share = splat(1.0f / sum_lanes(load_floats(space.total.data() + row * kLanes)));
        for (int64_t column = 0; column < p.value_dim; column += kLanes)
            store(to + column, first_lanes(p.value_dim - column),
                  load_floats(space.sums.data() + row * p.padded + column) * share);
    }
}

} // namespace

extern "C" {

// Bytes of scratch that fkv_eight_bit_attention wants.
int64_t fkv_eight_bit_attention_scratch(const int64_t *shape) {
    const Shape s(shape);
    return s.heads() * (s.panels * s.packing.panel_floats() + s.packing.dim) * 4;
}

// q [B, Hq, R, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] and out [B, Hq, R, Dv], each by three strides (batch, head, row;
// elements; the last dimension is dense). positions int64 [R], ascending; first_keys int64 [R], not descending, or
// none. Keys behind the last row, and panels before all windows, are not read. Products are multiplied by `scale`,
// which is positive.
void fkv_eight_bit_attention(const Element *q, const Element *k, const Element *v, Element *out,
                             const int64_t *positions, const int64_t *first_keys, float *scratch, const int64_t *shape,
                             const int64_t *strides, float scale, int threads) {
    const Shape s(shape);
    const Scoring scoring{positions, first_keys, nullptr, scale, 0.0f};
    const Operands x{q, k, v, out, {strides}, {strides + 3}, {strides + 6}, {strides + 9}};
    const Packed packed{s, scratch};
    const int64_t begin = panel_of(scoring.first(0)), origin = first_of(begin), seen = scoring.limit(s.rows - 1);
    const int64_t panels = panel_of(seen - 1) + 1 - begin, blocks = (s.folded() + kRowBlock - 1) / kRowBlock;
    const auto rows_of = [&](const Element *from, Strides steps, int64_t head, int64_t key) {
        return HeadRows{from + steps.at(head / s.kv_heads, head % s.kv_heads, key), steps.of[2]};
    };

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t head = 0; head < s.heads(); ++head)
            mean_key(s.packing.dim, rows_of(k, x.k_steps, head, origin), seen - origin, packed.mean(head));
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.heads() * panels; ++task) {
            const int64_t head = task / panels, panel = begin + task % panels, key = first_of(panel);
            const int64_t count = std::min(first_of(panel + 1), seen) - key;
            const Panel to = packed.panel(head, panel);
            const bool finite =
                pack_keys(s.packing, rows_of(k, x.k_steps, head, key), count, packed.mean(head), to);
            pack_values(s.packing, rows_of(v, x.v_steps, head, key), count, finite, to);
        }
        Workspace space(s.packing);
        // The last rows see most keys: they come first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.heads() * blocks; ++task) {
            const int64_t head = task % s.heads(), first = (blocks - 1 - task / s.heads()) * kRowBlock;
            const int64_t count = std::min(kRowBlock, s.folded() - first);
            const Folded at(s.kv_heads, s.groups, head, first);
            begin_rows(s, x, scoring, at, count, space);
            const int64_t last = panel_of(space.limits[count - 1] - 1);
            for (int64_t panel = panel_of(space.firsts[0]); panel <= last; ++panel)
                attend(s.packing, packed.panel(head, panel), first_of(panel), count, space);
            write_rows(s.packing, x, at, count, space);
        }
    }
}
}

#else

// These instructions are not there: no scratch is enough.
extern "C" int64_t fkv_eight_bit_attention_scratch(const int64_t *) { return -1; }
extern "C" void fkv_eight_bit_attention(const void *, const void *, const void *, void *, const int64_t *,
                                        const int64_t *, float *, const int64_t *, const int64_t *, float, int) {}

#endif
