/* Counters in memory that processes share, and bells by which one waits for another to move them.
 *
 * A bell is two words: how often it was rung, and how many sleep on it. Who moves a counter rings
 * the bell of whoever waits for it afterwards; who waits remembers the bell, looks at the counters,
 * and sleeps only if it has not been rung since. So no ring is lost, and none costs a system call
 * while nobody sleeps. */
#include "futex.h"
#include "vec.h"
#include "wait.h"

#include <sched.h>

#define LOOKS 16   /* pauses between two looks at the bell and the clock */
#define KEEP 50000 /* ns for which a core is not offered to others; a turn of theirs that counts */

EXPORT int64_t rollout_counter_read(void *counter) {
    return __atomic_load_n((uint32_t *)counter, __ATOMIC_ACQUIRE);
}

/* What was written before is seen by whoever sees the value. */
EXPORT void rollout_counter_write(void *counter, int64_t value) {
    __atomic_store_n((uint32_t *)counter, (uint32_t)value, __ATOMIC_RELEASE);
}

/* The count and the look must not swap: a sleeper counts itself first and looks at the bell
 * afterwards. */
EXPORT void rollout_bell_ring(void *bell) {
    uint32_t *words = bell;
    __atomic_fetch_add(words, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(words + 1, __ATOMIC_SEQ_CST)) wake(words);
}

/* Until the bell is not at `seen` any more: its count, or `seen` after `limit` ns. For `spin` ns it
 * is looked at without sleeping, soon between other threads' turns on this core, and no longer once
 * one of them has taken a turn of some length: somebody needs the core. The rest costs nothing. To
 * be woken takes far longer than to look, above all where cores are virtual. */
EXPORT int64_t rollout_bell_wait(void *bell, int64_t seen, int64_t spin, int64_t limit) {
    uint32_t *words = bell, found;
    int64_t began = now(), before = 0; /* of the last look */
    int sleeps = 0;
    while ((found = __atomic_load_n(words, __ATOMIC_SEQ_CST)) == (uint32_t)seen) {
        int64_t past = now() - began;
        if (past >= limit) break;
        if (past - before > KEEP) spin = 0;
        before = past;
        if (past < spin) {
            if (past > KEEP) sched_yield();
            for (int i = 0; i < LOOKS; i++) relax();
        } else if (!sleeps) {
            sleeps = 1;
            __atomic_fetch_add(words + 1, 1, __ATOMIC_SEQ_CST);
        } else {
            sleep_on(words, (uint32_t)seen, limit - past);
        }
    }
    if (sleeps) __atomic_fetch_sub(words + 1, 1, __ATOMIC_SEQ_CST);
    return found;
}
