/* Time, and sleeping on a word of memory that processes share until somebody wakes its sleepers. */
#ifndef ROLLOUT_FUTEX_H
#define ROLLOUT_FUTEX_H

#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define NAP 100000000 /* ns: no sleep is longer, should a wake-up ever be lost */

static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void sleep_on(uint32_t *word, uint32_t seen, int64_t ns) {
    struct timespec t = {0, ns < NAP ? ns : NAP};
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, 0, 0);
#else
    (void)word, (void)seen;
    if (t.tv_nsec > 50000) t.tv_nsec = 50000;
    nanosleep(&t, 0);
#endif
}

static inline void wake(uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
#else
    (void)word;
#endif
}

#endif
