// Pieces of a file's tensors from the system's cache to where they belong, each hashed while the processor still has it.
#include <atomic>
#include <cstdlib>

#include "helper.h"
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

// All pieces, cut into blocks that several threads take one after the other.
class Reading {
  public:
    Reading(int fd, int64_t together, int64_t count, const Destination *places, uint8_t *states)
        : fd_(fd), together_(together), count_(count), places_(places), states_(states) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t most = places[i].at_once(together);
            blocks_ += (places[i].pieces + most - 1) / most;
            if (waste_nbytes_ < most * places[i].unwanted()) waste_nbytes_ = most * places[i].unwanted();
        }
    }

    // Takes blocks until there are none, or one is not in the system's cache.
    void operator()() {
        char *const waste = waste_nbytes_ ? static_cast<char *>(std::malloc(waste_nbytes_)) : nullptr;
        if (waste_nbytes_ && waste == nullptr) return;
        for (int64_t block; (block = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;) {
            // Asking for more than the system has would have it read ahead, and wait.
            if (!read(block, waste)) next_.store(blocks_, std::memory_order_relaxed);
        }
        std::free(waste);
    }

  private:
    bool read(int64_t block, char *waste) {
        const Destination *place = places_;
        uint8_t *states = states_;
        int64_t most = place->at_once(together_);
        for (int64_t own; block >= (own = (place->pieces + most - 1) / most); most = place->at_once(together_)) {
            block -= own;
            states += place++->pieces;
        }
        const int64_t first = block * most, rest = place->pieces - first;
        return place->read(fd_, first, rest < most ? rest : most, waste, states);
    }

    int fd_;
    int64_t together_, count_, blocks_ = 0, waste_nbytes_ = 0;
    const Destination *places_;
    uint8_t *states_;
    std::atomic<int64_t> next_{0};
};

// Whether the system has this byte of a file in its cache.
bool is_cached(int fd, int64_t offset) {
    char byte;
    iovec place = {&byte, 1};
    return preadv2(fd, &place, 1, offset, RWF_NOWAIT) == 1;
}

Helper &helper() {
    // Never destroyed: its thread may wait until the process is gone.
    static Helper *const one = [] {
        pthread_atfork(nullptr, nullptr, [] { helper().forget(); });
        return new Helper;
    }();
    return *one;
}

}  // namespace

extern "C" {

// Reads blocks of about so many bytes, with a second thread if it is `shared`, until all are read or one is not in the
// system's cache. No piece has more segments than the system takes. Returns 0, or 1 if `states`, one number a piece,
// tells of something that is left or damaged.
int fkv_read_pieces(int fd, int64_t together, int64_t count, const void *destinations, uint8_t *states, int shared) {
    const auto *places = static_cast<const Destination *>(destinations);
    const Destination &last = places[count - 1];
    // Most likely the system has nothing of it then, and asking would have it read ahead, and wait.
    if (!is_cached(fd, last.offset + last.pieces * last.piece_nbytes() - 1)) return 1;
    Reading reading(fd, together, count, places, states);
    if (shared) helper().run(reading);
    else reading();
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; ++i) pieces += places[i].pieces;
    for (int64_t i = 0; i < pieces; ++i)
        if (states[i] != kRead) return 1;
    return 0;
}

// The 64 bits of XXH3 of segments, for whoever wants to compare: addresses and lengths in turns.
uint64_t fkv_xxh3_64(const void *segments, int64_t count) {
    return hash_segments(static_cast<const iovec *>(segments), count);
}
}
