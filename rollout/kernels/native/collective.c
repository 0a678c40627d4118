/* Sums and gathers among the processes of one machine, through memory they all map.
 *
 * The mapping, zero at first: a line of counters per rank, then two slots per rank. An exchange has
 * a number; in exchange s every rank fills its slot s % 2, counts itself in, and reads the slots of
 * those it waited for. Two slots are enough for one wait per exchange: who fills a slot for exchange
 * s has seen every rank enter s - 1, so every rank has finished reading s - 2.
 *
 * Entering is a release, seeing it an acquire. Who waits spins for `spin` ns, unless the late rank
 * was last seen on this very core and cannot come meanwhile; then it sleeps on the late rank's
 * counter until it is woken or the deadline has come. */
#define _GNU_SOURCE /* sched_getcpu */
#include "futex.h"
#include "vec.h"
#include "wait.h"

#include <sched.h>

#define LINE 64
#define PAGE 4096
#define LOOKS 16                    /* at the counter, between two looks at the clock */
#define SPLIT_BYTES 32768           /* from here on more than two ranks share out the sum */
#define MAX_RANKS 64
#define ALL_CAME (-1)

typedef struct {
    uint32_t entered; /* exchanges: the rank's own number of the next one */
    uint32_t sleepers;
    int32_t core; /* where the rank entered last */
    char rest[LINE - 12];
} line;

typedef struct {
    char *base;
    int rank, size;
    int64_t slot; /* bytes, a multiple of LINE */
    int64_t spin, deadline; /* ns */
} group;

static int core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

static line *line_of(const group *g, int rank) { return (line *)(g->base + rank * LINE); }

static char *slot_of(const group *g, int rank, uint32_t exchange) {
    int64_t head = ((int64_t)g->size * LINE + PAGE - 1) / PAGE * PAGE;
    return g->base + head + (2 * rank + (exchange & 1)) * g->slot;
}

/* Counts this rank into its exchange. The store and the load must not swap: a rank that goes to
 * sleep counts itself first and looks at the counter afterwards. */
static void enter(const group *g, uint32_t exchange) {
    line *mine = line_of(g, g->rank);
    __atomic_store_n(&mine->core, core(), __ATOMIC_RELAXED);
    __atomic_store_n(&mine->entered, exchange + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&mine->sleepers, __ATOMIC_SEQ_CST)) wake(&mine->entered);
}

static int is_in(line *peer, uint32_t exchange) { /* the numbers may wrap */
    return (int32_t)(__atomic_load_n(&peer->entered, __ATOMIC_ACQUIRE) - exchange) > 0;
}

static int sleep_for(const group *g, line *peer, uint32_t exchange) {
    int came;
    __atomic_fetch_add(&peer->sleepers, 1, __ATOMIC_SEQ_CST);
    while (!(came = is_in(peer, exchange))) {
        int64_t left = g->deadline - now();
        if (left <= 0) break;
        uint32_t seen = __atomic_load_n(&peer->entered, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - exchange) <= 0) sleep_on(&peer->entered, seen, left);
    }
    __atomic_fetch_sub(&peer->sleepers, 1, __ATOMIC_SEQ_CST);
    return came;
}

static int wait_for(const group *g, line *peer, uint32_t exchange) {
    if (is_in(peer, exchange)) return 1;
    int64_t until = now() + g->spin;
    while (__atomic_load_n(&peer->core, __ATOMIC_RELAXED) != core() && now() < until) {
        for (int i = 0; i < LOOKS; i++) {
            if (is_in(peer, exchange)) return 1;
            relax();
        }
    }
    return sleep_for(g, peer, exchange);
}

/* Enters, and waits for all others: ALL_CAME or the rank that did not. */
static int meet(const group *g, uint32_t exchange) {
    enter(g, exchange);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && !wait_for(g, line_of(g, r), exchange)) return r;
    return ALL_CAME;
}

/* Elements begin .. end of all ranks' slots, added in float32: of four ranks in a binary tree, else
 * in the order of the ranks. Slots hold whole vectors, so only the store can meet a tail. */
INLINE void add_up(const group *g, uint32_t exchange, int64_t begin, int64_t end, char *out,
                   int bf16) {
    const char *slots[MAX_RANKS];
    for (int r = 0; r < g->size; r++) slots[r] = slot_of(g, r, exchange);
    for (int64_t i = begin; i < end; i += VW) {
        vf sum = load(slots[0], i, bf16) + load(slots[1], i, bf16);
        if (g->size == 4)
            sum += load(slots[2], i, bf16) + load(slots[3], i, bf16);
        else
            for (int r = 2; r < g->size; r++) sum += load(slots[r], i, bf16);
        store_at(out, i - begin, end - begin, sum, bf16);
    }
}

static void add(const group *g, uint32_t exchange, int64_t begin, int64_t end, char *out,
                int bf16) {
    if (bf16) add_up(g, exchange, begin, end, out, 1);
    else add_up(g, exchange, begin, end, out, 0);
}

/* The part of `count` elements that a rank adds up, in whole lines. */
static int64_t part(const group *g, int rank, int64_t count) {
    int64_t each = (count + g->size - 1) / g->size;
    int64_t begin = rank * ((each + LINE - 1) / LINE * LINE);
    return begin < count ? begin : count;
}

/* Every rank adds one part and hands it to the others in the next exchange. */
static int reduce_in_parts(const group *g, uint32_t exchange, char *data, int64_t count, int bf16) {
    int64_t width = bf16 ? 2 : 4;
    char *mine = slot_of(g, g->rank, exchange + 1);
    add(g, exchange, part(g, g->rank, count), part(g, g->rank + 1, count), mine, bf16);
    int late = meet(g, exchange + 1);
    if (late != ALL_CAME) return late;
    for (int r = 0; r < g->size; r++) {
        int64_t begin = part(g, r, count), size = part(g, r + 1, count) - begin;
        memcpy(data + begin * width, slot_of(g, r, exchange + 1), (size_t)(size * width));
    }
    return ALL_CAME;
}

static group open_group(void *base, int32_t rank, int32_t size, int64_t slot, int64_t spin,
                        int64_t timeout) {
    return (group){base, rank, size, slot, spin, now() + timeout};
}

/* Sums `data` over the ranks, in place; times in ns. Returns -1, or the rank that did not come in
 * time: the group cannot be used again then. */
EXPORT int32_t rollout_group_sum(void *base, int32_t rank, int32_t size, int64_t slot, int64_t spin,
                                 int64_t timeout, char *data, int64_t count, int32_t bf16) {
    group g = open_group(base, rank, size, slot, spin, timeout);
    int64_t width = bf16 ? 2 : 4, most = slot / width;
    for (int64_t n; count > 0; data += n * width, count -= n) {
        n = count < most ? count : most;
        uint32_t exchange = line_of(&g, rank)->entered;
        memcpy(slot_of(&g, rank, exchange), data, (size_t)(n * width));
        int late = meet(&g, exchange);
        if (late == ALL_CAME && size > 2 && n * width >= SPLIT_BYTES)
            late = reduce_in_parts(&g, exchange, data, n, bf16);
        else if (late == ALL_CAME)
            add(&g, exchange, 0, n, data, bf16);
        if (late != ALL_CAME) return late;
    }
    return ALL_CAME;
}

/* `n` bytes of rank's rows, from byte `at` on, to their places in the wide rows of `out`. */
static void place(const char *from, int64_t at, int64_t n, int64_t row_bytes, int rank, int size,
                  char *out) {
    for (int64_t end = at + n, length; at < end; at += length, from += length) {
        int64_t row = at / row_bytes, column = at % row_bytes;
        length = row_bytes - column < end - at ? row_bytes - column : end - at;
        memcpy(out + (row * size + rank) * row_bytes + column, from, (size_t)length);
    }
}

/* Every rank's `rows` of `row_bytes`, side by side in each row of `out`. Returns what
 * rollout_group_sum does. */
EXPORT int32_t rollout_group_gather(void *base, int32_t rank, int32_t size, int64_t slot,
                                    int64_t spin, int64_t timeout, const char *data, int64_t rows,
                                    int64_t row_bytes, char *out) {
    group g = open_group(base, rank, size, slot, spin, timeout);
    int64_t bytes = rows * row_bytes;
    for (int64_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < slot ? bytes - done : slot;
        uint32_t exchange = line_of(&g, rank)->entered;
        memcpy(slot_of(&g, rank, exchange), data + done, (size_t)n);
        int late = meet(&g, exchange);
        if (late != ALL_CAME) return late;
        for (int r = 0; r < size; r++)
            place(slot_of(&g, r, exchange), done, n, row_bytes, r, size, out);
    }
    return ALL_CAME;
}
