/* The experts of a mixture in int8: codes [experts, outputs, inputs] row by row, and a float32 scale
 * of each output. As int8.c each row of inputs is quantised by its largest value, before w1 and w3
 * and again before w2, and sums are exact; each product is rounded to bfloat16, what a token's
 * experts give is added in float32 in its own order, and rounded once. */
#include "area.h"
#include "int8.h"
#include "team.h"

#define BLOCK 16 /* outputs of an item */
#define ROWS 4   /* inputs that meet four rows of codes at once */

typedef struct {
    const uint16_t *x;
    const int8_t *w13, *w2;
    const float *s13, *s2;
    const int64_t *experts; /* [tokens, chosen] */
    const void *weights;    /* the same; float32 where `wide` */
    uint16_t *out;
    int64_t x_row, tokens, chosen, hidden, size, held, first;
    int32_t wide;
    /* Places are pairs of (token, expert) that are held here, grouped by expert. */
    uint8_t *codes, *inner_codes;    /* of tokens, of places */
    float *scales, *inner_scales;
    uint16_t *inner, *down;          /* [places, size], [pairs, hidden] */
    int32_t *pairs, *starts, *active; /* pair of a place, first place of an expert, experts wanted */
    int64_t places, wanted;
} Mixture;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sums of rows of codes, kept without a sign, by four rows of a weight. */
INLINE void dots(int rows, const uint8_t *const *x, const int8_t *const *w, int64_t inputs,
                 int32_t (*sums)[4]) {
#if VNNI && defined(__AVX512BW__)
    __m512i sum[ROWS][4], above[4], offset = _mm512_set1_epi32((int)0x80808080u);
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) {
        above[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r][t] = _mm512_setzero_si512();
    }
    for (int64_t i = 0; i < inputs; i += 64) {
        __mmask64 mask = inputs - i >= 64 ? ~0ull : (1ull << (inputs - i)) - 1;
        __m512i word[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
            word[t] = _mm512_maskz_loadu_epi8(mask, w[t] + i);
            above[t] = _mm512_dpbusd_epi32(above[t], offset, word[t]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i code = _mm512_maskz_loadu_epi8(mask, x[r] + i);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], code, word[t]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++)
            sums[r][t] = _mm512_reduce_add_epi32(_mm512_sub_epi32(sum[r][t], above[t]));
#else
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < 4; t++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < inputs; i++) sum += (x[r][i] - OFFSET) * w[t][i];
            sums[r][t] = sum;
        }
#endif
}

static void some_dots(int rows, const uint8_t *const *x, const int8_t *const *w, int64_t inputs,
                      int32_t (*sums)[4]) {
    switch (rows) {
    case 1: dots(1, x, w, inputs, sums); break;
    case 2: dots(2, x, w, inputs, sums); break;
    case 3: dots(3, x, w, inputs, sums); break;
    default: dots(ROWS, x, w, inputs, sums);
    }
}

/* Some outputs of w1 and w3 of an expert, for all of its tokens. */
static void gate_item(const Mixture *m, int64_t expert, int64_t n0) {
    int64_t count = least(BLOCK, m->size - n0), hidden = m->hidden;
    const int8_t *w = m->w13 + expert * 2 * m->size * hidden;
    const float *s = m->s13 + expert * 2 * m->size;
    for (int64_t at = m->starts[expert]; at < m->starts[expert + 1]; at += ROWS) {
        int rows = (int)least(ROWS, m->starts[expert + 1] - at);
        const uint8_t *x[ROWS];
        float own[ROWS], both[ROWS][2][BLOCK] = {0};
        for (int r = 0; r < rows; r++) {
            int64_t token = m->pairs[at + r] / m->chosen;
            x[r] = m->codes + token * hidden, own[r] = m->scales[token];
        }
        for (int64_t j = 0; j < count; j += 2) {
            int64_t row[4];
            const int8_t *codes[4];
            int32_t sums[ROWS][4];
            for (int t = 0; t < 4; t++) {
                row[t] = t / 2 * m->size + n0 + least(j + t % 2, count - 1);
                codes[t] = w + row[t] * hidden;
            }
            some_dots(rows, x, codes, hidden, sums);
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < 4; t++)
                    both[r][t / 2][j + t % 2] = (float)sums[r][t] * (own[r] * s[row[t]]);
        }
        for (int r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j += VW) {
                vf up = round_to(load(both[r][1], j, 0), 1);
                vf v = silu(round_to(load(both[r][0], j, 0), 1), 1) * up;
                store_at(m->inner + (at + r) * m->size + n0, j, count, v, 1);
            }
    }
}

/* Some outputs of w2 of an expert, for all of its tokens. */
static void down_item(const Mixture *m, int64_t expert, int64_t n0) {
    int64_t count = least(BLOCK, m->hidden - n0), size = m->size;
    const int8_t *w = m->w2 + (expert * m->hidden + n0) * size;
    const float *s = m->s2 + expert * m->hidden + n0;
    for (int64_t at = m->starts[expert]; at < m->starts[expert + 1]; at += ROWS) {
        int rows = (int)least(ROWS, m->starts[expert + 1] - at);
        const uint8_t *x[ROWS];
        float made[ROWS][BLOCK + 4];
        for (int r = 0; r < rows; r++) x[r] = m->inner_codes + (at + r) * size;
        for (int64_t j = 0; j < count; j += 4) {
            const int8_t *codes[4];
            int32_t sums[ROWS][4];
            for (int t = 0; t < 4; t++) codes[t] = w + least(j + t, count - 1) * size;
            some_dots(rows, x, codes, size, sums);
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < 4; t++)
                    made[r][j + t] = (float)sums[r][t] *
                                     (m->inner_scales[at + r] * s[least(j + t, count - 1)]);
        }
        for (int r = 0; r < rows; r++)
            for (int64_t j = 0; j < count; j += VW)
                store_at(m->down + m->pairs[at + r] * m->hidden + n0, j, count,
                         load_at(made[r], j, count, 0), 1);
    }
}

/* What a token's experts give, times their weights. */
static void sum_token(const Mixture *m, int64_t token) {
    for (int64_t j = 0; j < m->hidden; j += VW) {
        vf sum = splat(0);
        for (int64_t c = token * m->chosen; c < (token + 1) * m->chosen; c++) {
            int64_t expert = m->experts[c] - m->first;
            if (expert < 0 || expert >= m->held) continue;
            vf weight = splat(load_n(m->weights, c, 1, !m->wide)[0]);
            sum += round_to(load_at(m->down + c * m->hidden, j, m->hidden, 1) * weight, !m->wide);
        }
        store_at(m->out + token * m->hidden, j, m->hidden, sum, 1);
    }
}

static void mixture_part(Team *t, const Mixture *m, int32_t threads) {
    int64_t gates = (m->size + BLOCK - 1) / BLOCK, downs = (m->hidden + BLOCK - 1) / BLOCK;
    for (int64_t i; (i = claim(t)) < m->tokens;)
        m->scales[i] = quantize_row(m->x + i * m->x_row, m->hidden, 1, OFFSET,
                                    m->codes + i * m->hidden);
    meet(t, threads);
    for (int64_t i; (i = claim(t)) < m->wanted * gates;)
        gate_item(m, m->active[i / gates], i % gates * BLOCK);
    meet(t, threads);
    for (int64_t i; (i = claim(t)) < m->places;)
        m->inner_scales[i] = quantize_row(m->inner + i * m->size, m->size, 1, OFFSET,
                                          m->inner_codes + i * m->size);
    meet(t, threads);
    for (int64_t i; (i = claim(t)) < m->wanted * downs;)
        down_item(m, m->active[i / downs], i % downs * BLOCK);
    meet(t, threads);
    for (int64_t i; (i = claim(t)) < m->tokens;) sum_token(m, i);
}

/* Which pairs are held here, by expert: a stable counting sort. */
static void sort_pairs(Mixture *m) {
    int64_t pairs = m->tokens * m->chosen;
    memset(m->starts, 0, (size_t)(m->held + 1) * sizeof *m->starts);
    for (int64_t i = 0; i < pairs; i++) {
        int64_t expert = m->experts[i] - m->first;
        if (expert >= 0 && expert < m->held) m->starts[expert + 1]++;
    }
    m->wanted = 0;
    for (int64_t e = 0; e < m->held; e++) {
        if (m->starts[e + 1]) m->active[m->wanted++] = (int32_t)e;
        m->starts[e + 1] += m->starts[e];
    }
    m->places = m->starts[m->held];
    for (int64_t i = 0; i < pairs; i++) {
        int64_t expert = m->experts[i] - m->first;
        if (expert >= 0 && expert < m->held) m->pairs[m->starts[expert]++] = (int32_t)i;
    }
    for (int64_t e = m->held; e > 0; e--) m->starts[e] = m->starts[e - 1];
    m->starts[0] = 0;
}

static char *carve(char **from, int64_t bytes) {
    char *found = *from;
    *from += (bytes + 63) / 64 * 64;
    return found;
}

/* w13: [held, 2 size, hidden], w2: [held, hidden, size]; those of expert `first` come first. */
EXPORT void rollout_int8_experts(const uint16_t *x, int64_t x_row, const int8_t *w13,
                                 const float *s13, const int8_t *w2, const float *s2,
                                 const int64_t *experts, const void *weights, uint16_t *out,
                                 int64_t tokens, int64_t chosen, int64_t hidden, int64_t size,
                                 int64_t held, int64_t first, int32_t wide, int32_t threads) {
    Mixture m = {.x = x, .w13 = w13, .w2 = w2, .s13 = s13, .s2 = s2, .experts = experts};
    m.weights = weights, m.out = out, m.x_row = x_row, m.tokens = tokens, m.chosen = chosen;
    m.hidden = hidden, m.size = size, m.held = held, m.first = first, m.wide = wide;
    int64_t pairs = tokens * chosen;
    int64_t bytes = tokens * (hidden + 4) + pairs * (3 * size + 2 * hidden + 8) + 8 * held;
    char *area = work_area((size_t)bytes + 1024);
    m.codes = (uint8_t *)carve(&area, tokens * hidden);
    m.scales = (float *)carve(&area, tokens * 4);
    m.inner = (uint16_t *)carve(&area, pairs * size * 2);
    m.inner_codes = (uint8_t *)carve(&area, pairs * size);
    m.inner_scales = (float *)carve(&area, pairs * 4);
    m.down = (uint16_t *)carve(&area, pairs * hidden * 2);
    m.pairs = (int32_t *)carve(&area, pairs * 4);
    m.starts = (int32_t *)carve(&area, (held + 1) * 4);
    m.active = (int32_t *)carve(&area, held * 4);
    sort_pairs(&m);
    Team team = {0};
    if (m.places * hidden * size < 65536) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    mixture_part(&team, &m, omp_get_num_threads());
}
