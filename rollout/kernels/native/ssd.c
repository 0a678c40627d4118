/* The recurrence of Mamba-2. One thread has some columns of a head's state for all tokens of a
 * sequence. Tokens are taken several at a time, so that a state is read and written once for them;
 * each element goes through the same operations in the same order as token by token: the bits do
 * not depend on how a sequence is cut into steps. */
#include "state_slots.h"
#include "team.h"
#include "vec.h"

#define VECTORS 2 /* of columns that one part has: with TOKENS what fits the registers */
#define COLUMNS (VECTORS * VW)
#define TOKENS 4
#define MAX_STATE 512 /* rows of a state */
#define SMALL 4096    /* multiplications below which threads cost more than they save */

typedef struct {
    const char *x, *b, *c; /* rows of tokens; heads and groups are dense */
    char *out;             /* dense */
    const float *steps, *rates, *skips;
    float *states; /* [slots, heads, size, dim] */
    const int32_t *slots, *starts, *lengths;
    int64_t x_row, b_row, c_row; /* elements */
    int64_t sequences, groups, heads, size, dim;
} Ssd;

INLINE void to_float(const void *from, int64_t at, int64_t size, float *out, int bf16) {
    for (int64_t i = 0; i < size; i += VW)
        store_at(out, i, size, load_at(from, at + i, at + size, bf16), 0);
}

/* `n` tokens from t on: columns c .. c + vectors * VW of `state`, all of which exist if `whole`. */
INLINE void advance(const Ssd *p, float *state, int64_t t, int n, int64_t head, int64_t c,
                    int vectors, int whole, int bf16) {
    int64_t dim = p->dim, size = p->size, group = head / (p->heads / p->groups) * size;
    float key[TOKENS][MAX_STATE], query[TOKENS][MAX_STATE], decay[TOKENS];
    vf values[TOKENS][VECTORS], sums[TOKENS][VECTORS];
    for (int k = 0; k < n; k++) {
        float step = p->steps[(t + k) * p->heads + head];
        decay[k] = expf(p->rates[head] * step);
        to_float(p->b, (t + k) * p->b_row + group, size, key[k], bf16);
        to_float(p->c, (t + k) * p->c_row + group, size, query[k], bf16);
        int64_t at = (t + k) * p->x_row + head * dim;
        for (int i = 0; i < vectors; i++) {
            vf x = load_at(p->x, at + c + i * VW, at + dim, bf16);
            values[k][i] = x * splat(step), sums[k][i] = x * splat(p->skips[head]);
        }
    }
    for (int64_t r = 0; r < size; r++)
        for (int i = 0; i < vectors; i++) {
            int64_t at = r * dim + c + i * VW, end = (r + 1) * dim;
            vf row = whole ? load(state, at, 0) : load_at(state, at, end, 0);
            for (int k = 0; k < n; k++) {
                row = fused(values[k][i], splat(key[k][r]), row * splat(decay[k]));
                sums[k][i] = fused(row, splat(query[k][r]), sums[k][i]);
            }
            if (whole) store(state, at, row, 0);
            else store_at(state, at, end, row, 0);
        }
    for (int k = 0; k < n; k++) {
        int64_t to = ((t + k) * p->heads + head) * dim;
        for (int i = 0; i < vectors; i++)
            store_at(p->out, to + c + i * VW, to + dim, sums[k][i], bf16);
    }
}

/* Columns c .. c + COLUMNS of one head of one sequence. */
INLINE void scan_columns(const Ssd *p, int64_t s, int64_t head, int64_t c, int bf16) {
    int64_t dim = p->dim, from = p->starts[s], stop = p->starts[s + 1], t = from;
    float *state = p->states + (p->slots[s] * p->heads + head) * p->size * dim;
    if (p->lengths[s] == stop - from)
        for (int64_t r = 0; r < p->size; r++)
            for (int64_t i = c; i < dim && i < c + COLUMNS; i++) state[r * dim + i] = 0;
    if (c + COLUMNS <= dim) {
        for (; t + TOKENS <= stop; t += TOKENS)
            advance(p, state, t, TOKENS, head, c, VECTORS, 1, bf16);
        for (; t < stop; t++) advance(p, state, t, 1, head, c, VECTORS, 1, bf16);
    } else {
        int vectors = (int)((dim - c + VW - 1) / VW);
        for (; t < stop; t++) advance(p, state, t, 1, head, c, vectors, 0, bf16);
    }
}

/* Not 0: nothing has been done, as there is padding. */
EXPORT int32_t rollout_ssd_scan(const void *problem, int32_t bf16, int32_t threads) {
    const Ssd *p = problem;
    if (has_padding(p->slots, p->sequences)) return 1;
    Team team = {0};
    int64_t blocks = (p->dim + COLUMNS - 1) / COLUMNS, parts = p->heads * blocks;
    if (p->starts[p->sequences] * p->heads * p->size * p->dim < SMALL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t part; (part = claim(&team)) < p->sequences * parts;) {
        int64_t head = part % parts / blocks, c = part % blocks * COLUMNS;
        if (bf16) scan_columns(p, part / parts, head, c, 1);
        else scan_columns(p, part / parts, head, c, 0);
    }
    return 0;
}
