/* Threads that share out an op by claiming its parts, and may go on to the next one together:
 * meeting costs a fraction of ending a parallel region and beginning another. */
#ifndef ROLLOUT_TEAM_H
#define ROLLOUT_TEAM_H

#include "wait.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>

#define SPINS 1000 /* looks before others may have the core: tens of microseconds */
#define YIELDS 1000
#define NAP 50000 /* ns, after so many of those */

typedef struct {
    int64_t claimed __attribute__((aligned(64))); /* parts of the op at hand */
    int32_t arrived __attribute__((aligned(64)));
    int32_t meetings __attribute__((aligned(64)));
    int32_t failed, crowded; /* crowded: there are fewer cores than threads, so nobody spins */
} Team;

static inline int64_t claim(Team *t) {
    return __atomic_fetch_add(&t->claimed, 1, __ATOMIC_RELAXED);
}

/* All `size` threads of a team have come, and what any did before is seen by all; parts count from
 * 0 again. */
static inline void meet(Team *t, int32_t size) {
    int32_t meeting = __atomic_load_n(&t->meetings, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&t->arrived, 1, __ATOMIC_ACQ_REL) == size) {
        t->arrived = 0, t->claimed = 0;
        __atomic_store_n(&t->meetings, meeting + 1, __ATOMIC_RELEASE);
        return;
    }
    int looks = t->crowded ? SPINS : 0;
    for (; __atomic_load_n(&t->meetings, __ATOMIC_ACQUIRE) == meeting; looks++) {
        if (looks < SPINS) relax();
        else if (looks < SPINS + YIELDS) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = NAP}, 0), looks = SPINS + YIELDS;
    }
}

#if defined(_OPENMP)
int omp_get_num_threads(void);
#else
static inline int omp_get_num_threads(void) { return 1; }
#endif

#endif
