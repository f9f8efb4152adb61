// Pieces of a file's tensors from the system's cache to where they belong, each hashed while the processor still has it.
#include <cstdlib>

#include "xxh3.h"

namespace {

using namespace fkv;

constexpr int64_t kMostSegments = 1024;  // IOV_MAX of Linux

enum State : uint8_t { kLeft = 0, kRead = 1, kDamaged = 2 };

// Pieces of one tensor. A piece is so many runs of bytes, with bytes before and after each that nobody wants.
struct Destination {
    int64_t address, piece_step, run_step, runs, run_nbytes, before, after;
    int64_t offset, pieces;
    const uint64_t *digests;

    int64_t unwanted() const { return runs * (before + after); }
    int64_t piece_nbytes() const { return runs * run_nbytes + unwanted(); }
    int64_t segments() const { return runs * (1 + (before > 0) + (after > 0)); }

    int64_t at_once(int64_t together) const {
        int64_t most = together / piece_nbytes();
        if (most > kMostSegments / segments()) most = kMostSegments / segments();
        return most < 1 ? 1 : most;
    }

    // Where a piece's bytes go, in their order.
    iovec *lay_out(int64_t piece, char *waste, iovec *to) const {
        for (int64_t run = 0; run < runs; ++run) {
            char *const wanted = reinterpret_cast<char *>(address + piece * piece_step + run * run_step);
            if (before > 0) *to++ = {waste, static_cast<size_t>(before)};
            *to++ = {wanted, static_cast<size_t>(run_nbytes)};
            if (after > 0) *to++ = {waste + before, static_cast<size_t>(after)};
            waste += before + after;
        }
        return to;
    }

    // False if the system has not all of these pieces.
    bool read(int fd, int64_t first, int64_t count, char *waste, uint8_t *states) const {
        iovec places[kMostSegments], *end = places;
        for (int64_t i = 0; i < count; ++i) end = lay_out(first + i, waste + i * unwanted(), end);
        const int64_t nbytes = piece_nbytes();
        if (preadv2(fd, places, static_cast<int>(end - places), offset + first * nbytes, RWF_NOWAIT) != count * nbytes)
            return false;
        for (int64_t i = 0; i < count; ++i) {
            const bool good = hash_segments(places + i * segments(), segments()) == digests[first + i];
            states[first + i] = good ? kRead : kDamaged;
        }
        return true;
    }
};

}  // namespace

extern "C" {

// Reads blocks of about so many bytes until all are taken, or one is not in the system's cache. Several threads may
// call this with the same arguments: `next` is the first block that nobody has taken. No piece has more segments than
// the system takes. Returns 0, or 1 if this thread has left or found something that `states` tells: one number a piece.
int fkv_read_pieces(int fd, int64_t *next, int64_t together, int64_t count, const void *destinations,
                    uint8_t *states) {
    const auto *places = static_cast<const Destination *>(destinations);
    int64_t blocks = 0, waste_nbytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t most = places[i].at_once(together);
        blocks += (places[i].pieces + most - 1) / most;
        if (waste_nbytes < most * places[i].unwanted()) waste_nbytes = most * places[i].unwanted();
    }
    char *const waste = waste_nbytes ? static_cast<char *>(std::malloc(waste_nbytes)) : nullptr;
    if (waste_nbytes && waste == nullptr) return 1;
    bool whole = true;
    for (;;) {
        int64_t block = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), piece = 0, i = 0;
        if (block >= blocks) break;
        int64_t most = places[i].at_once(together);
        for (int64_t own; block >= (own = (places[i].pieces + most - 1) / most); most = places[i].at_once(together)) {
            block -= own;
            piece += places[i++].pieces;
        }
        const int64_t first = block * most, rest = places[i].pieces - first;
        if (!places[i].read(fd, first, rest < most ? rest : most, waste, states + piece)) {
            // Asking for more would have the system read ahead, and wait.
            __atomic_store_n(next, blocks, __ATOMIC_RELAXED);
            whole = false;
            break;
        }
        for (int64_t j = 0; j < (rest < most ? rest : most); ++j) whole &= states[piece + first + j] == kRead;
    }
    std::free(waste);
    return whole ? 0 : 1;
}

// Whether the system has this byte of a file in its cache.
int fkv_is_cached(int fd, int64_t offset) {
    char byte;
    iovec place = {&byte, 1};
    return preadv2(fd, &place, 1, offset, RWF_NOWAIT) == 1;
}

// The 64 bits of XXH3 of segments, for whoever wants to compare: addresses and lengths in turns.
uint64_t fkv_xxh3_64(const void *segments, int64_t count) {
    return hash_segments(static_cast<const iovec *>(segments), count);
}
}
