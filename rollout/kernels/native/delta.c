/* What a gated delta net does between its projections. One thread has a sequence's channels or
 * columns for all its tokens, and goes from token to token: the bits do not depend on how a
 * sequence is cut into steps. */
#include "state_slots.h"
#include "team.h"
#include "vec.h"

#define CHANNELS 64      /* of one part of a convolution */
#define COLUMNS (4 * VW) /* of a state that one part holds: what fits the first cache */
#define MAX_KEY 512      /* elements of a key */
#define MAX_WIDTH 8      /* inputs of a convolution */
#define SMALL 4096       /* multiplications below which threads cost more than they save */

INLINE float number(const void *p, int64_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Channels c .. c + VW of all tokens of a sequence; `window` holds the inputs before the next. */
INLINE void convolve(const void *x, int64_t row, const void *weight, const void *bias,
                     void *state, void *out, int64_t tokens, int fresh, int64_t c,
                     int64_t channels, int32_t width, int bf16) {
    vf window[MAX_WIDTH], factors[MAX_WIDTH];
    int lanes = c + VW <= channels ? VW : (int)(channels - c);
    for (int j = 0; j < width; j++) {
        float w[VW] = {0}, s[VW] = {0};
        for (int i = 0; i < lanes; i++) {
            w[i] = number(weight, (c + i) * width + j, bf16);
            if (!fresh && j < width - 1) s[i] = number(state, (c + i) * (width - 1) + j, bf16);
        }
        factors[j] = load(w, 0, 0), window[j] = load(s, 0, 0);
    }
    vf first = bias ? load_at(bias, c, channels, bf16) : (vf){0};
    for (int64_t t = 0; t < tokens; t++) {
        window[width - 1] = load_at(x, t * row + c, t * row + channels, bf16);
        vf sum = first;
        for (int j = 0; j < width; j++) sum = fused(window[j], factors[j], sum);
        for (int j = 0; j + 1 < width; j++) window[j] = window[j + 1];
        store_at(out, t * channels + c, t * channels + c + lanes, silu(round_to(sum, bf16), bf16),
                 bf16);
    }
    for (int j = 0; j < width - 1; j++)
        for (int i = 0; i < lanes; i++) {
            float kept = window[j][i];
            uint32_t bits;
            memcpy(&bits, &kept, sizeof bits); /* exact: it was an input */
            int64_t at = (c + i) * (width - 1) + j;
            if (bf16) ((uint16_t *)state)[at] = (uint16_t)(bits >> 16);
            else ((float *)state)[at] = kept;
        }
}

/* Not 0: nothing has been done, as there is padding. So below. */
EXPORT int32_t rollout_causal_conv(const void *x, int64_t row, const void *weight,
                                   const void *bias, void *states, const int32_t *slots,
                                   const int32_t *starts, const int32_t *lengths, void *out,
                                   int64_t sequences, int64_t channels, int32_t width,
                                   int32_t bf16, int32_t threads) {
    if (has_padding(slots, sequences)) return 1;
    Team team = {0};
    int64_t parts = (channels + CHANNELS - 1) / CHANNELS, size = bf16 ? 2 : 4;
    if (starts[sequences] * channels * width < SMALL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t part; (part = claim(&team)) < sequences * parts;) {
        int64_t s = part / parts, first = part % parts * CHANNELS, from = starts[s];
        int64_t tokens = starts[s + 1] - from;
        for (int64_t c = first; c < first + CHANNELS && c < channels; c += VW) {
            const char *in = (const char *)x + from * row * size;
            char *to = (char *)out + from * channels * size;
            char *state = (char *)states + slots[s] * channels * (width - 1) * size;
            int fresh = lengths[s] == tokens;
            if (bf16)
                convolve(in, row, weight, bias, state, to, tokens, fresh, c, channels, width, 1);
            else
                convolve(in, row, weight, bias, state, to, tokens, fresh, c, channels, width, 0);
        }
    }
    return 0;
}

typedef struct {
    const char *q, *k, *v; /* rows of tokens; heads are dense */
    char *out;             /* dense */
    const float *gates, *betas;
    float *states; /* [slots, heads, key_dim, dim] */
    const int32_t *slots, *starts, *lengths;
    int64_t q_row, k_row, v_row; /* elements */
    int64_t sequences, key_heads, heads, key_dim, dim;
    int64_t by_row; /* a gate for each row of a state, instead of one for all of it */
    float scale, eps;
} Delta;

/* A key or query of length 1, times `scale`. */
INLINE void unit(const void *x, int64_t at, int64_t dim, float scale, float eps, float *out,
                 int bf16) {
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += VW) {
        vf v = load_at(x, at + d, at + dim, bf16);
        squares = fused(v, v, squares);
    }
    vf by = splat(1.0f / sqrtf(reduce_sum(squares) + eps));
    for (int64_t d = 0; d < dim; d += VW)
        store_at(out, d, dim, load_at(x, at + d, at + dim, bf16) * by * scale, 0);
}

/* Columns c .. c + COLUMNS of one head of one sequence. */
INLINE void scan(const Delta *p, int64_t s, int64_t head, int64_t c, int bf16) {
    int64_t dim = p->dim, rows = p->key_dim, group = head / (p->heads / p->key_heads);
    int64_t from = p->starts[s], stop = p->starts[s + 1];
    int vectors = (int)((dim - c + VW - 1) / VW);
    if (vectors > COLUMNS / VW) vectors = COLUMNS / VW;
    float key[MAX_KEY], query[MAX_KEY], decays[MAX_KEY];
    float *state = p->states + (p->slots[s] * p->heads + head) * rows * dim;
    if (p->lengths[s] == stop - from)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = c; i < dim && i < c + COLUMNS; i++) state[r * dim + i] = 0;
    for (int64_t t = from; t < stop; t++) {
        unit(p->k, t * p->k_row + group * rows, rows, 1.0f, p->eps, key, bf16);
        unit(p->q, t * p->q_row + group * rows, rows, p->scale, p->eps, query, bf16);
        const float *gates = p->gates + (t * p->heads + head) * (p->by_row ? rows : 1);
        if (p->by_row)
            for (int64_t r = 0; r < rows; r++) decays[r] = expf(gates[r]);
        vf decay = splat(expf(gates[0]));
        vf beta = splat(p->betas[t * p->heads + head]);
        vf sums[COLUMNS / VW] = {{0}}, reads[COLUMNS / VW] = {{0}};
        for (int64_t r = 0; r < rows; r++) {
            if (p->by_row) decay = splat(decays[r]);
            for (int i = 0; i < vectors; i++) {
                int64_t at = r * dim + c + i * VW, end = (r + 1) * dim;
                vf row = load_at(state, at, end, 0) * decay;
                store_at(state, at, end, row, 0);
                sums[i] = fused(row, splat(key[r]), sums[i]);
            }
        }
        int64_t value = t * p->v_row + head * dim;
        for (int i = 0; i < vectors; i++)
            sums[i] = (load_at(p->v, value + c + i * VW, value + dim, bf16) - sums[i]) * beta;
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) {
                int64_t at = r * dim + c + i * VW, end = (r + 1) * dim;
                vf row = fused(sums[i], splat(key[r]), load_at(state, at, end, 0));
                store_at(state, at, end, row, 0);
                reads[i] = fused(row, splat(query[r]), reads[i]);
            }
        int64_t to = (t * p->heads + head) * dim;
        for (int i = 0; i < vectors; i++)
            store_at(p->out, to + c + i * VW, to + dim, reads[i], bf16);
    }
}

EXPORT int32_t rollout_gated_delta_rule(const void *problem, int32_t bf16, int32_t threads) {
    const Delta *p = problem;
    if (has_padding(p->slots, p->sequences)) return 1;
    Team team = {0};
    int64_t blocks = (p->dim + COLUMNS - 1) / COLUMNS, parts = p->heads * blocks;
    if (p->starts[p->sequences] * p->heads * p->key_dim * p->dim < SMALL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t part; (part = claim(&team)) < p->sequences * parts;) {
        int64_t head = part % parts / blocks, c = part % blocks * COLUMNS;
        if (bf16) scan(p, part / parts, head, c, 1);
        else scan(p, part / parts, head, c, 0);
    }
    return 0;
}
