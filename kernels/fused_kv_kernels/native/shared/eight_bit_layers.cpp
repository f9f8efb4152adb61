// Linear layers and MLPs with a gate in eight bits: a block of rows is rounded, multiplied and scaled back while it is
// in a core's cache.
#include "eight_bit_tiles.h"
#include "row_norm.h"

#if defined(FKV_HAS_BYTES)
#include <vector>

namespace {

using namespace fkv;

// Tiles of a block: with what its rows become in an MLP, it fills the second cache.
constexpr int64_t kLeastTiles = 4, kMostTiles = 16, kMostRows = kMostTiles * kByteTileRows;
constexpr int64_t kPanel = kByteTileRegisters * kLanes; // outputs of a panel

// Rounded weights of layers with a common input, in panels: words [panels][words][kPanel] of four inputs, what sums of
// an output begin with, by what they are multiplied, and by what inputs are before they are rounded.
struct Weights {
    const uint32_t *words_;
    const int32_t *begins;
    const float *scales, *factors;
    int64_t inputs, outputs;

    Weights(const int64_t *addresses, int64_t inputs, int64_t outputs)
        : words_(reinterpret_cast<const uint32_t *>(addresses[0])),
          begins(reinterpret_cast<const int32_t *>(addresses[1])),
          scales(reinterpret_cast<const float *>(addresses[2])),
          factors(reinterpret_cast<const float *>(addresses[3])), inputs(inputs), outputs(outputs) {}
    int64_t words() const { return (inputs + 3) / 4; }
    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    const uint32_t *panel(int64_t number) const { return words_ + number * words() * kPanel; }
};

// Up to kMostRows rounded rows of inputs, and their scales.
struct RoundedRows {
    std::vector<uint32_t> words;
    float scales[kMostRows];
    int64_t row_words = 0;

    // For what it holds next.
    void begin(int64_t words_of_row) {
        row_words = words_of_row;
        words.resize(std::max<size_t>(words.size(), kMostRows * row_words));
    }
    uint8_t *row(int64_t number) { return reinterpret_cast<uint8_t *>(words.data() + number * row_words); }

    template <typename Read> void set(int64_t number, int64_t dim, const Read &read) {
        scales[number] = round_row(dim, largest_magnitude(dim, read), read, row(number));
    }
    // Sums of `count` rows from `first` on with a panel, dense.
    void multiply(int64_t first, int64_t count, const Weights &by, int64_t panel, int32_t *sums) const {
        byte_rows<kByteTileRegisters>(count, kPanel, row_words, {words.data() + first * row_words, row_words},
                                      {by.panel(panel), kPanel, by.begins + panel * kPanel}, sums, kPanel);
    }
};

// Each thread's memory. It is kept from layer to layer: mapping fresh pages would take a part of the time.
struct Workspace {
    RoundedRows inputs, hidden;
    std::vector<float> gated;
};
thread_local Workspace workspace;

// A norm of rows before they are rounded, or none.
struct Norm {
    const Element *weight = nullptr;
    float epsilon = 0.0f;
};

void round_inputs(const Weights &of, const Norm &norm, const Element *x, int64_t rows, RoundedRows &to) {
    for (int64_t row = 0; row < rows; ++row, x += of.inputs) {
        const auto read = [&](int64_t column) { return scaled(x, of.factors, column, of.inputs); };
        if (!norm.weight) {
            to.set(row, of.inputs, read);
            continue;
        }
        to.set(row, of.inputs, [&](int64_t column) {
            return read(column) * load(norm.weight + column, first_lanes(of.inputs - column));
        });
        to.scales[row] *= norm_factor(x, of.inputs, norm.epsilon);
    }
}

// Writes what the rows make, added to `addends` if they are given; these may be what is written.
void write_outputs(const Weights &by, const RoundedRows &from, int64_t rows, const Element *addends, Element *out) {
    alignas(64) int32_t sums[kByteTileRows * kPanel];
    for (int64_t panel = 0; panel < by.panels(); ++panel)
        for (int64_t first = 0; first < rows; first += kByteTileRows) {
            const int64_t count = std::min<int64_t>(kByteTileRows, rows - first);
            from.multiply(first, count, by, panel, sums);
            for (int64_t row = 0; row < count; ++row)
                for (int64_t part = 0; part < kPanel; part += kLanes) {
                    const int64_t column = panel * kPanel + part;
                    const Mask here = first_lanes(by.outputs - column);
                    const int64_t at = (first + row) * by.outputs + column;
                    const Lanes scale = load_floats(by.scales + column, here) * splat(from.scales[first + row]);
                    const Lanes value = in_floats(load_whole(sums + row * kPanel + part)) * scale;
                    store(out + at, here, addends ? load(addends + at, here) + value : value);
                }
        }
}

// silu(gate) * up of rows: the gate's panels come first, and then as many of what it is multiplied with.
void gate_rows(const Weights &by, const RoundedRows &from, int64_t rows, float *hidden) {
    alignas(64) int32_t gates[kByteTileRows * kPanel], ups[kByteTileRows * kPanel];
    const int64_t width = by.outputs / 2, panels = by.panels() / 2;
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t first = 0; first < rows; first += kByteTileRows) {
            const int64_t count = std::min<int64_t>(kByteTileRows, rows - first);
            from.multiply(first, count, by, panel, gates);
            from.multiply(first, count, by, panels + panel, ups);
            for (int64_t row = 0; row < count; ++row)
                for (int64_t part = 0; part < kPanel; part += kLanes) {
                    const int64_t column = panel * kPanel + part, at = row * kPanel + part;
                    const Lanes scale = splat(from.scales[first + row]);
                    const float *const scales = by.scales + column;
                    const Lanes gate = in_floats(load_whole(gates + at)) * (load_floats(scales) * scale);
                    const Lanes up = in_floats(load_whole(ups + at)) * (load_floats(scales + width) * scale);
                    store_floats(hidden + (first + row) * width + column, gated(gate, up));
                }
        }
}

// Calls use(first, count) with blocks of rows, of whole tiles, that keep all threads busy to the end. A block reads all
// weights, so few rows make fewer blocks than there may be threads.
template <typename Use> void by_blocks(int64_t rows, int threads, const Use &use) {
    const int64_t tiles = (rows + kByteTileRows - 1) / kByteTileRows, most = threads * kMostTiles;
    const int64_t even = (tiles + most - 1) / most * threads;
    const int64_t blocks = std::max<int64_t>(1, std::min(even, tiles / kLeastTiles));
#pragma omp for schedule(dynamic, 1)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = tiles * block / blocks * kByteTileRows;
        use(first, std::min(rows, tiles * (block + 1) / blocks * kByteTileRows) - first);
    }
}

} // namespace

extern "C" {

// Outputs of a panel, and whether products of two neighbours are added up in sixteen bits.
void fkv_eight_bit_sizes(int64_t *sizes) {
    sizes[0] = kPanel;
    sizes[1] = kAddsPairs;
}

// x [rows, inputs] and out [rows, outputs], dense; weights as struct Weights has them; norm [inputs] or none.
void fkv_eight_bit_linear(const Element *x, const int64_t *weights, const Element *norm, Element *out, int64_t rows,
                          int64_t inputs, int64_t outputs, float epsilon, int threads) {
    const Weights by(weights, inputs, outputs);
#pragma omp parallel num_threads(threads)
    {
        RoundedRows &rounded = workspace.inputs;
        rounded.begin(by.words());
        by_blocks(rows, threads, [&](int64_t first, int64_t count) {
            round_inputs(by, {norm, epsilon}, x + first * inputs, count, rounded);
            write_outputs(by, rounded, count, nullptr, out + first * outputs);
        });
    }
}

// x [rows, inputs] and out [rows, outputs], dense: down(silu(gate(x)) * up(x)). The weights of gate and up are one,
// [inputs, 2 width]; width fills whole panels. sizes: rows, inputs, width, outputs, and those of a row of `attended`.
// With attended, it is the second half of a decoder layer: h + the same of norm(h), with h = x + output(attended).
void fkv_eight_bit_mlp(const Element *x, const int64_t *gate_up_weights, const int64_t *down_weights, Element *out,
                       const int64_t *sizes, const Element *attended, const int64_t *output_weights,
                       const Element *norm, float epsilon, int threads) {
    const int64_t rows = sizes[0], inputs = sizes[1], width = sizes[2], outputs = sizes[3];
    const Weights gate_up(gate_up_weights, inputs, 2 * width), down(down_weights, width, outputs);
#pragma omp parallel num_threads(threads)
    {
        Workspace &own = workspace;
        own.inputs.begin(gate_up.words());
        own.hidden.begin(down.words());
        own.gated.resize(std::max<size_t>(own.gated.size(), kMostRows * width));
        by_blocks(rows, threads, [&](int64_t first, int64_t count) {
            const Element *from = x + first * inputs;
            Element *const to = out + first * outputs;
            if (attended) {
                const Weights output(output_weights, sizes[4], inputs);
                own.inputs.begin(output.words());
                round_inputs(output, {}, attended + first * sizes[4], count, own.inputs);
                write_outputs(output, own.inputs, count, from, to);
                own.inputs.begin(gate_up.words());
                from = to;
            }
            round_inputs(gate_up, {norm, epsilon}, from, count, own.inputs);
            gate_rows(gate_up, own.inputs, count, own.gated.data());
            for (int64_t row = 0; row < count; ++row)
                own.hidden.set(row, width, [&](int64_t column) {
                    return load_floats(own.gated.data() + row * width + column) * load_floats(down.factors + column);
                });
            write_outputs(down, own.hidden, count, attended ? to : nullptr, to);
        });
    }
}
}

#else

// Not for these instructions, and the sizes say so.
extern "C" void fkv_eight_bit_sizes(int64_t *sizes) { sizes[0] = sizes[1] = 0; }
extern "C" void fkv_eight_bit_linear(const void *, const int64_t *, const void *, void *, int64_t, int64_t, int64_t,
                                     float, int) {}
extern "C" void fkv_eight_bit_mlp(const void *, const int64_t *, const int64_t *, void *, const int64_t *, const void *,
                                  const int64_t *, const void *, float, int) {}

#endif
