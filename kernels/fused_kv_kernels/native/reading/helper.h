// One thread of the process that helps whoever has work for two, without the interpreter that both would wait for.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace fkv {

// Whoever asks for help goes on meanwhile, and waits at the end only for a helper that is in the middle of something:
// without a free core it comes late, finds nothing to do, and has cost nothing.
class Helper {
  public:
    // Does the work here, and in the helper too unless it helps somebody else; returns when both have left it.
    template <class Work> void run(Work &work) {
        const bool helped = offer([](void *of) { (*static_cast<Work *>(of))(); }, &work);
        work();
        if (helped) leave();
    }

    // In a forked process, which has none of its parent's threads.
    void forget() {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_cond_init(&offered_, nullptr);
        pthread_cond_init(&left_, nullptr);
        started_ = taken_ = false;
        avoided_ = -1;
        call_ = nullptr;
        inside_ = false;
    }

  private:
    // A few times as long as waking a thread takes.
    static constexpr int64_t kAwakeNs = 300000;

    bool offer(void (*call)(void *), void *of) {
        pthread_mutex_lock(&mutex_);
        const bool free = !taken_ && (started_ || start()) && stays_off(sched_getcpu());
        if (free) {
            taken_ = true;
            of_ = of;
            call_ = call;
            pthread_cond_signal(&offered_);
        }
        pthread_mutex_unlock(&mutex_);
        return free;
    }

    void leave() {
        stay_awake([this] { return !inside_.load(std::memory_order_acquire); });
        pthread_mutex_lock(&mutex_);
        call_ = nullptr;
        while (inside_.load(std::memory_order_relaxed)) pthread_cond_wait(&left_, &mutex_);
        taken_ = false;
        pthread_mutex_unlock(&mutex_);
    }

    // A system that has let a thread sleep likes to wake it on the core that it is woken from, where both would wait for
    // each other. False if there is no other core.
    bool stays_off(int core) {
        cpu_set_t others;
        if (core != avoided_ && sched_getaffinity(0, sizeof others, &others) == 0) {
            CPU_CLR(core, &others);
            avoided_ = core;
            others_ = CPU_COUNT(&others);
            if (others_ > 0) pthread_setaffinity_np(thread_, sizeof others, &others);
        }
        return others_ > 0;
    }

    // With all signals blocked: they are the interpreter's. A system without room for a thread has no helper.
    bool start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        started_ = pthread_create(&thread_, &detached, &serve, this) == 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (started_) pthread_setname_np(thread_, "fused-kv-helper");
        pthread_attr_destroy(&detached);
        return started_;
    }

    // Waits without sleeping, for a while; whoever needs the core gets it.
    template <class Until> static void stay_awake(Until until) {
        for (const int64_t end = now_ns() + kAwakeNs; now_ns() < end; sched_yield())
            for (int i = 0; i < 100; ++i) {
                if (until()) return;
                relax();
            }
    }

    // Leaves the core's other thread its resources.
    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#endif
    }

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }

    static void *serve(void *self) {
        Helper &own = *static_cast<Helper *>(self);
        pthread_mutex_lock(&own.mutex_);
        for (;;) {
            if (own.call_ == nullptr) {
                // A request reads one chunk after the other, and waking takes as long as reading a fifth of one.
                pthread_mutex_unlock(&own.mutex_);
                stay_awake([&own] { return own.call_.load(std::memory_order_relaxed) != nullptr; });
                pthread_mutex_lock(&own.mutex_);
            }
            while (own.call_ == nullptr) pthread_cond_wait(&own.offered_, &own.mutex_);
            void (*const call)(void *) = own.call_;
            void *const of = own.of_;
            own.call_ = nullptr;
            own.inside_.store(true, std::memory_order_relaxed);
            pthread_mutex_unlock(&own.mutex_);
            call(of);
            pthread_mutex_lock(&own.mutex_);
            own.inside_.store(false, std::memory_order_release);
            pthread_cond_signal(&own.left_);
        }
    }

    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t offered_ = PTHREAD_COND_INITIALIZER, left_ = PTHREAD_COND_INITIALIZER;
    pthread_t thread_{};
    int avoided_ = -1, others_ = 0;
    bool started_ = false, taken_ = false;
    std::atomic<void (*)(void *)> call_{nullptr};
    void *of_ = nullptr;
    std::atomic<bool> inside_{false};
};

}  // namespace fkv
