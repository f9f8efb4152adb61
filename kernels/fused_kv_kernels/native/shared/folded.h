// The query heads that share a key head, folded into rows, and where their numbers lie.
#pragma once

#include <cstdint>

namespace fkv {

// Elements from batch to batch, head to head and row to row.
struct Strides {
    const int64_t *of;
    int64_t at(int64_t batch, int64_t head, int64_t row) const { return batch * of[0] + head * of[1] + row * of[2]; }
};

// Folded rows of a key head, one after another: the row and the query head that each is of.
struct Folded {
    int64_t batch, q_head, row, first_head, groups;

    // `head` counts the key heads of all batches.
    Folded(int64_t kv_heads, int64_t groups, int64_t head, int64_t first)
        : batch(head / kv_heads), q_head(head % kv_heads * groups + first % groups), row(first / groups),
          first_head(head % kv_heads * groups), groups(groups) {}
    void step() {
        if (++q_head == first_head + groups) {
            q_head = first_head;
            ++row;
        }
    }
};

} // namespace fkv
