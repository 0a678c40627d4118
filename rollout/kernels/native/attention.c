/* Paged causal attention with an online softmax (Milakov and Gimelshein 2018; Dao 2022).
 *
 * One work item is a KV head and a tile of up to ROWS rows (queries x the heads of the group) of
 * one sequence. It walks the keys from position 0 in tiles of KEYS: the tile's K is laid out
 * transposed and its V dense, and both products are the same small GEMM. So each
 * page is read once per item: once for the whole group in decode.
 *
 * Both are float32; or, of bfloat16 where AVX-512 has its dot products, words of two neighbours of
 * the dimension that is summed: the head's for Q K^T, the keys for weights x V, where the weights
 * are rounded to bfloat16 as SDPA rounds them.
 *
 * A softmax runs over SPAN keys, then the spans are added up in their order. The spans of a decoded
 * token are items of their own, so that one long context occupies all threads; whoever ends the
 * last adds them up.
 *
 * Codes of 8 bits are widened as they are laid out; the scale of a key multiplies its scores, that of
 * a value its weights.
 *
 * Every row sums its keys in the same order whatever tile, batch or thread it is in: its bits
 * depend on its own sequence only. */
#include "kv_codes.h"
#include "ops.h"
#include "vec.h"

#include <stdlib.h>

#define ROWS 64
#define KEYS 128
#define SPAN 1024 /* a multiple of KEYS */
#define MAX_DIM 256
#if VW == 8
#define ROW_BLOCK 4 /* 16 registers: 8 sums, 2 of B, a broadcast */
#else
#define ROW_BLOCK 8
#endif

/* A softmax so far, of each row: its largest score, the weights' sum, and weights x V. */
typedef struct {
    float *peak, *mass, *sums;
} State;

typedef struct {
    float kt[MAX_DIM + 2 * VW][KEYS];
    float v[KEYS * MAX_DIM];
    float q[ROWS * MAX_DIM];
    float scores[ROWS][KEYS];
    float states[2][ROWS * (MAX_DIM + 2)];
    float k_scales[KEYS], v_scales[KEYS];
    const void *k_rows[KEYS], *v_rows[KEYS], *next_k[VW], *next_v[VW];
} Scratch;

/* Up to ROWS rows: queries x the heads of a KV head's group. */
typedef struct {
    int sequence, head, first_query, queries;
} Tile;

INLINE int whole_vectors(int count) { return (count + VW - 1) / VW * VW; }
INLINE int state_size(int rows, int padded) { return 2 * whole_vectors(rows) + rows * padded; }
INLINE State state_at(float *at, int rows) {
    int room = whole_vectors(rows);
    return (State){at, at + room, at + 2 * room};
}

/* C[rows, 2 VW] (+)= A[rows, depth] B[depth, 2 VW] with everything in registers. */
INLINE void gemm_tile(int rows, int wide, int depth, const float *a, int lda, const float *b,
                      int ldb, float *c, int ldc, int add, int words) {
    vf sum[ROW_BLOCK][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++) sum[r][j] = add ? load(c + r * ldc, j * VW, 0) : splat(0);
    for (int k = 0; k < depth; k++) {
        vf row[2];
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++) row[j] = load(b + (int64_t)k * ldb, j * VW, 0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = repeat(a + r * lda + k);
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                sum[r][j] = words ? dot(x, row[j], sum[r][j]) : fused(x, row[j], sum[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < wide; j++) store(c + r * ldc, j * VW, sum[r][j], 0);
}

INLINE void gemm_rows(int rows, int wide, int depth, const float *a, int lda, const float *b,
                      int ldb, float *c, int ldc, int add, int words) {
    switch (rows) {
    case 1: gemm_tile(1, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
    case 2: gemm_tile(2, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
    case 3: gemm_tile(3, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
#if ROW_BLOCK == 8
    case 4: gemm_tile(4, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
    case 5: gemm_tile(5, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
    case 6: gemm_tile(6, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
    case 7: gemm_tile(7, wide, depth, a, lda, b, ldb, c, ldc, add, words); break;
#endif
    default: gemm_tile(ROW_BLOCK, wide, depth, a, lda, b, ldb, c, ldc, add, words);
    }
}

/* columns: a multiple of VW. */
INLINE void gemm(int rows, int columns, int depth, const float *a, int lda, const float *b, int ldb,
                 float *c, int ldc, int add, int words) {
    for (int n = 0; n < columns; n += 2 * VW)
        for (int r = 0; r < rows; r += ROW_BLOCK) {
            int count = rows - r < ROW_BLOCK ? rows - r : ROW_BLOCK;
            const float *left = a + r * lda, *right = b + n;
            float *to = c + r * ldc + n;
            if (n + VW < columns)
                gemm_rows(count, 2, depth, left, lda, right, ldb, to, ldc, add, words);
            else
                gemm_rows(count, 1, depth, left, lda, right, ldb, to, ldc, add, words);
        }
}

#if defined(__clang__)
#define ZIP(a, b, from) zip(a, b, from)
INLINE vu zip(vu a, vu b, int from) {
    vu out;
    for (int i = 0; i < VW; i++) out[i] = i & 1 ? b[from + i / 2] : a[from + i / 2];
    return out;
}
#else
#define ZIP(a, b, from) __builtin_shuffle(a, b, (vu)((LANES >> 1) + (from) + (LANES & 1) * VW))
#endif

/* log2(VW) perfect shuffles transpose a square of VW x VW words. */
INLINE void transpose(vu *x) {
    vu y[VW];
#pragma GCC unroll 4
    for (int width = 1; width < VW; width *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < VW / 2; i++) {
            y[2 * i] = ZIP(x[i], x[i + VW / 2], 0);
            y[2 * i + 1] = ZIP(x[i], x[i + VW / 2], VW / 2);
        }
#pragma GCC unroll 16
        for (int i = 0; i < VW; i++) x[i] = y[i];
    }
}

/* Words of two bfloat16 or one float32, of the codes from d on. */
INLINE vu words_of(const void *codes, int d, int dim, int bf16, int kind) {
    if (bf16) return from_code_pairs((vi)grow(load_code_pairs(codes, d, dim)), kind);
    return (vu)from_codes(load_codes(codes, d, dim), kind);
}

/* kt[d][key] for VW keys: words of two bfloat16 or one float32 are transposed. */
INLINE void lay_out_keys(const void **rows, int key, int dim, Scratch *s, int bf16, int kind) {
    int step = bf16 ? 2 * VW : VW, size = bf16 ? 2 : 4;
    for (int d = 0; d < dim; d += step) {
        vu x[VW];
        if (kind) {
            for (int i = 0; i < VW; i++) x[i] = words_of(rows[key + i], d, dim, bf16, kind);
        } else if (d + step <= dim) {
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++)
                memcpy(&x[i], (const char *)rows[key + i] + d * size, sizeof x[i]);
        } else {
            memset(x, 0, sizeof x);
            for (int i = 0; i < VW; i++)
                memcpy(&x[i], (const char *)rows[key + i] + d * size, (size_t)((dim - d) * size));
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < VW; i++) {
            if (DOTS && bf16) {
                store(s->kt[d / 2 + i], key, (vf)x[i], 0);
            } else if (bf16) {
                store(s->kt[d + 2 * i], key, (vf)(x[i] << 16), 0);
                store(s->kt[d + 2 * i + 1], key, (vf)(x[i] & 0xffff0000u), 0);
            } else {
                store(s->kt[d + i], key, (vf)x[i], 0);
            }
        }
    }
}

static void pack_coded_keys(const void **rows, int key, int dim, Scratch *s, int bf16, int kind) {
    if (kind == E4M3) lay_out_keys(rows, key, dim, s, bf16, E4M3);
    else lay_out_keys(rows, key, dim, s, bf16, INT8);
}
INLINE void pack_keys(const void **rows, int key, int dim, Scratch *s, int bf16, int kind) {
    if (kind) pack_coded_keys(rows, key, dim, s, bf16, kind);
    else lay_out_keys(rows, key, dim, s, bf16, PLAIN);
}

/* v[key][d], or words of two keys; after an odd last one comes zero. */
INLINE void lay_out_values(const void **rows, int keys, int dim, int padded, Scratch *s, int bf16,
                           int kind) {
    int step = DOTS && bf16 ? 2 : 1;
    for (int j = 0; j < keys; j += step)
        for (int d = 0; d < dim; d += VW) {
            if (kind) {
                vb codes = load_codes(rows[j], d, dim), others = {0};
                if (step == 2 && j + 1 < keys) others = load_codes(rows[j + 1], d, dim);
                vi pair = grow_bytes(codes) | grow_bytes(others) << 8;
                vf x = step == 2 ? (vf)from_code_pairs(pair, kind) : from_codes(codes, kind);
                store(s->v + j / step * padded, d, x, 0);
                continue;
            }
            vf x = load_at(rows[j], d, dim, bf16), next = splat(0);
            if (step == 2) {
                if (j + 1 < keys) next = load_at(rows[j + 1], d, dim, bf16);
                x = (vf)((vu)x >> 16 | (vu)next);
            }
            store(s->v + j / step * padded, d, x, 0);
        }
}

static void pack_coded_values(const void **rows, int keys, int dim, int padded, Scratch *s,
                              int bf16, int kind) {
    if (kind == E4M3) lay_out_values(rows, keys, dim, padded, s, bf16, E4M3);
    else lay_out_values(rows, keys, dim, padded, s, bf16, INT8);
}
INLINE void pack_values(const void **rows, int keys, int dim, int padded, Scratch *s, int bf16,
                        int kind) {
    if (kind) pack_coded_values(rows, keys, dim, padded, s, bf16, kind);
    else lay_out_values(rows, keys, dim, padded, s, bf16, PLAIN);
}

/* Where keys first .. first + count of a sequence lie; the pointers up to a multiple of VW repeat
 * the last, so that whole vectors may be read. */
INLINE void locate(const Problem *p, int sequence, int head, int first, int count,
                   const void **k_rows, const void **v_rows, int size) {
    const int32_t *table = p->tables + (int64_t)sequence * p->table_width;
    int64_t stride = (int64_t)p->dim * size;
    int page = first / p->block, offset = first % p->block;
    for (int j = 0; j < count; page++, offset = 0) {
        int64_t at = (table[page] * p->kv_block + head * p->kv_head) * size + offset * stride;
        const char *k = (const char *)p->k + at, *v = (const char *)p->v + at;
        int stop = count - j < p->block - offset ? count : j + p->block - offset;
        for (; j < stop; j++, k += stride, v += stride) k_rows[j] = k, v_rows[j] = v;
    }
    for (int j = count; j % VW; j++) k_rows[j] = k_rows[count - 1];
}

/* The scales of those keys, and zeros up to a multiple of VW. */
static void locate_scales(const Problem *p, int sequence, int head, int first, int count,
                          Scratch *s) {
    const int32_t *table = p->tables + (int64_t)sequence * p->table_width;
    int page = first / p->block, offset = first % p->block;
    for (int j = 0; j < count; page++, offset = 0) {
        int64_t at = ((int64_t)table[page] * p->kv_heads + head) * p->block + offset;
        int run = count - j < p->block - offset ? count - j : p->block - offset;
        memcpy(s->k_scales + j, p->k_scales + at, sizeof(float) * (size_t)run);
        memcpy(s->v_scales + j, p->v_scales + at, sizeof(float) * (size_t)run);
        j += run;
    }
    for (int j = count; j % VW; j++) s->k_scales[j] = s->v_scales[j] = 0;
}

/* Rows of pages lie where no hardware prefetcher would look for them. */
INLINE void fetch(const void **rows, int count, int bytes) {
    for (int j = 0; j < count; j++)
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)rows[j] + at);
}

/* Scores, scaled and bent towards +-cap. */
static __attribute__((noinline)) void bend(float *row, int keys, float scale, float cap) {
    for (int j = 0; j < keys; j += VW) {
        vf x = load(row, j, 0) * (scale / cap), size = blend(x < 0, -x, x);
        vf power = exp_negative(size * -2.0f), tanh = (1.0f - power) / (1.0f + power);
        store(row, j, blend(x < 0, -tanh, tanh) * cap, 0);
    }
}

/* Turn a row of scores into weights, float32 or bfloat16 in their place; of `keys` those count from
 * `from` up to `visible`: at least one. */
INLINE void soften(float *row, int from, int visible, int keys, float scale, float cap, float *sums,
                   int padded, float *peak, float *mass, int words, const float *k_scales,
                   const float *v_scales) {
    for (int k = 0; k_scales && k < keys; k += VW)
        store(row, k, load(row, k, 0) * load(k_scales, k, 0), 0);
    vf high = splat(-INFINITY);
    int j = 0;
    if (cap > 0) {
        bend(row, keys, scale, cap);
        scale = 1;
    }
    for (; j < from; j += VW)
        store(row, j, blend(LANES + j < from, splat(-INFINITY), load(row, j, 0)), 0);
    j = 0;
    for (; j + VW <= visible; j += VW) high = vmax(high, load(row, j, 0));
    for (; j < keys; j += VW) {
        vf x = blend(LANES + j < visible, load(row, j, 0), splat(-INFINITY));
        store(row, j, x, 0);
        high = vmax(high, x);
    }
    float top = reduce_max(high) * scale, before = *peak;
    if (!(top > before)) top = before;
    float anchor = top == -INFINITY ? 0 : top; /* nothing but scores of -infinity so far */
    vf sum = splat(0.0f);
    for (j = 0; j < keys; j += VW) {
        vf x = exp_negative(fused(load(row, j, 0), splat(scale), splat(-anchor)));
        store(row, j, v_scales ? x * load(v_scales, j, 0) : x, words);
        sum += x;
    }
    *peak = top;
    if (top == before) {
        *mass += reduce_sum(sum);
        return;
    }
    float shrink = exp_negative(splat(before - top))[0];
    *mass = *mass * shrink + reduce_sum(sum);
    for (int d = 0; d < padded; d += VW) store(sums, d, load(sums, d, 0) * shrink, 0);
}

/* Floats or words that a row of Q and K has. */
INLINE int depth_of(int dim, int bf16) { return DOTS && bf16 ? (dim + 1) / 2 : dim; }

/* The queries of a tile, as words where products are of words. */
static void load_queries(const Problem *p, Tile t, Scratch *s, int bf16) {
    int group = p->heads / p->kv_heads, rows = t.queries * group, dim = p->dim;
    int words = DOTS && bf16, depth = depth_of(dim, bf16);
    int first_row = p->starts[t.sequence] + t.first_query;
    for (int r = 0; r < rows; r++) {
        int64_t at = (first_row + r / group) * p->q_row + (t.head * group + r % group) * p->q_head;
        const void *q = (const char *)p->q + at * (bf16 ? 2 : 4);
        s->q[r * depth + depth - 1] = 0;
        if (words) memcpy(s->q + r * depth, q, (size_t)dim * 2);
        else
            for (int d = 0; d < dim; d += VW)
                store_at(s->q + r * dim, d, dim, load_at(q, d, dim, bf16), 0);
    }
}

/* Position of a tile's first query in its sequence. */
static int position_of(const Problem *p, Tile t) {
    int tokens = p->starts[t.sequence + 1] - p->starts[t.sequence];
    return p->lengths[t.sequence] - tokens + t.first_query;
}

/* The first key that a query at `position` sees. */
INLINE int first_key(const Problem *p, int position) {
    return p->window && position >= p->window ? position - p->window + 1 : 0;
}

/* The softmax of a tile's rows over keys `key` .. `stop`. */
INLINE void run_span(const Problem *p, Tile t, int key, int stop, State to, Scratch *s, int bf16) {
    int group = p->heads / p->kv_heads, rows = t.queries * group, dim = p->dim;
    int padded = whole_vectors(dim), words = DOTS && bf16, coded = p->codes;
    int size = coded ? 1 : bf16 ? 2 : 4; /* bytes of an element in its page */
    int depth = depth_of(dim, bf16), position = position_of(p, t);
    for (int r = 0; r < rows; r++) to.peak[r] = -INFINITY, to.mass[r] = 0;
    memset(to.sums, 0, sizeof(float) * (size_t)(rows * padded));
    int low = first_key(p, position) / KEYS * KEYS; /* whole tiles: an order for all */
    for (key = key < low ? low : key; key < stop; key += KEYS) {
        int keys = stop - key < KEYS ? stop - key : KEYS;
        int whole = whole_vectors(keys);
        locate(p, t.sequence, t.head, key, keys, s->k_rows, s->v_rows, size);
        /* What no query of the tile sees may be anything by now, and weighs 0. */
        for (int j = first_key(p, position) - key, own = j; j-- > 0;)
            s->k_rows[j] = s->k_rows[own], s->v_rows[j] = s->v_rows[own];
        if (coded) {
            locate_scales(p, t.sequence, t.head, key, keys, s);
            for (int j = first_key(p, position) - key; j-- > 0;)
                s->k_scales[j] = s->v_scales[j] = 0;
        }
        for (int j = 0; j < whole; j += VW) {
            if (j + VW < whole) fetch(s->k_rows + j + VW, VW, dim * size);
            fetch(s->v_rows + j, keys - j < VW ? keys - j : VW, dim * size);
            pack_keys(s->k_rows, j, dim, s, bf16, coded);
        }
        int ahead = stop - key - KEYS < VW ? stop - key - KEYS : VW;
        if (ahead > 0) {
            locate(p, t.sequence, t.head, key + KEYS, ahead, s->next_k, s->next_v, size);
            fetch(s->next_k, ahead, dim * size);
        }
        pack_values(s->v_rows, keys, dim, padded, s, bf16, coded);
        /* Queries that lie before this tile see none of it, nor do those whose window does not
         * reach back to it. */
        int hidden = key > position ? (key - position) * group : 0, last = rows;
        if (p->window) {
            int64_t reach = ((int64_t)key + keys + p->window - 1 - position) * group;
            if (reach < last) last = (int)reach;
        }
        gemm(last - hidden, whole, depth, s->q + hidden * depth, depth, s->kt[0], KEYS,
             s->scores[hidden], KEYS, 0, words);
        for (int r = hidden; r < last; r++) {
            int visible = position + r / group + 1 - key;
            int from = first_key(p, position + r / group) - key;
            soften(s->scores[r], from, visible < keys ? visible : keys, whole, p->scale,
                   p->softcap, to.sums + r * padded, padded, &to.peak[r], &to.mass[r], words,
                   coded ? s->k_scales : 0, coded ? s->v_scales : 0);
        }
        gemm(last - hidden, padded, words ? (keys + 1) / 2 : keys, s->scores[hidden], KEYS, s->v,
             padded, to.sums + hidden * padded, padded, 1, words);
    }
}

/* Add the next span to those before it; rows that see nothing of it stay as they are. */
static __attribute__((noinline)) void add_span(State to, State next, int rows, int padded) {
    for (int r = 0; r < rows; r++) {
        if (next.mass[r] == 0) continue;
        float top = next.peak[r] > to.peak[r] ? next.peak[r] : to.peak[r];
        float old = exp_negative(splat(to.peak[r] - top))[0];
        float new = exp_negative(splat(next.peak[r] - top))[0];
        to.peak[r] = top, to.mass[r] = to.mass[r] * old + next.mass[r] * new;
        float *sums = to.sums + r * padded, *others = next.sums + r * padded;
        for (int d = 0; d < padded; d += VW)
            store(sums, d, fused(load(sums, d, 0), splat(old), load(others, d, 0) * new), 0);
    }
}

/* The rows of a tile, done. */
static void finish(const Problem *p, Tile t, State from, int bf16) {
    int group = p->heads / p->kv_heads, dim = p->dim, padded = whole_vectors(dim);
    int first_row = p->starts[t.sequence] + t.first_query;
    for (int r = 0; r < t.queries * group; r++) {
        int head = t.head * group + r % group;
        int64_t to = (int64_t)(first_row + r / group) * p->heads + head;
        float share = 1.0f / from.mass[r];
        if (p->sinks) {
            float sink = p->sinks[head], top = sink > from.peak[r] ? sink : from.peak[r];
            float old = exp_negative(splat(from.peak[r] - top))[0];
            share = old / (from.mass[r] * old + exp_negative(splat(sink - top))[0]);
        }
        for (int d = 0; d < dim; d += VW)
            store_at((char *)p->out + to * dim * (bf16 ? 2 : 4), d, dim,
                     load(from.sums + r * padded, d, 0) * share, bf16);
    }
}

static void span_f32(const Problem *p, Tile t, int key, int stop, State to, Scratch *s) {
    run_span(p, t, key, stop, to, s, 0);
}
static void span_bf16(const Problem *p, Tile t, int key, int stop, State to, Scratch *s) {
    run_span(p, t, key, stop, to, s, 1);
}

/* All of a tile. */
static void attend(const Problem *p, Tile t, Scratch *s, int bf16) {
    int rows = t.queries * (p->heads / p->kv_heads), end = position_of(p, t) + t.queries;
    State whole = state_at(s->states[0], rows), next = state_at(s->states[1], rows);
    load_queries(p, t, s, bf16);
    int first = first_key(p, position_of(p, t)) / SPAN * SPAN;
    for (int key = first; key < end; key += SPAN) {
        int stop = end - key < SPAN ? end : key + SPAN;
        (bf16 ? span_bf16 : span_f32)(p, t, key, stop, key > first ? next : whole, s);
        if (key > first) add_span(whole, next, rows, whole_vectors(p->dim));
    }
    finish(p, t, whole, bf16);
}

/* Span `which` of `spans` of a decoded token, whose states lie at `parts`; the last to come adds
 * them up, and counts `left` from the start again. */
static void attend_span(const Problem *p, Tile t, int which, int spans, float *parts, int32_t *left,
                        Scratch *s, int bf16) {
    int group = p->heads / p->kv_heads, padded = whole_vectors(p->dim);
    int64_t size = state_size(group, padded);
    int end = position_of(p, t) + 1;
    int key = (first_key(p, end - 1) / SPAN + which) * SPAN;
    int stop = end - key < SPAN ? end : key + SPAN;
    State first = state_at(parts, group);
    load_queries(p, t, s, bf16);
    (bf16 ? span_bf16 : span_f32)(p, t, key, stop, state_at(parts + which * size, group), s);
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL)) return;
    *left = spans;
    for (int i = 1; i < spans; i++)
        add_span(first, state_at(parts + i * size, group), group, padded);
    finish(p, t, first, bf16);
}

/* How many spans the only query of a sequence has for itself; 1: its tile is one item. */
static int spans_of(const Problem *p, int sequence) {
    int queries = p->starts[sequence + 1] - p->starts[sequence];
    int length = p->lengths[sequence];
    return queries == 1 ? (length + SPAN - 1) / SPAN - first_key(p, length - 1) / SPAN : 1;
}

/* The items of each sequence: its tiles or spans, each times the KV heads. */
struct AttentionPlan {
    int64_t *before; /* tiles and spans of the sequences before each; the last is the total */
    int64_t *states; /* where the states of each sequence's spans begin */
    int32_t *left;   /* spans to come, of each sequence and KV head */
    float *parts;
};

AttentionPlan *plan_attention(const Problem *p) {
    int queries = ROWS / (p->heads / p->kv_heads);
    int64_t size = state_size(p->heads / p->kv_heads, whole_vectors(p->dim)), spread = 0;
    int64_t count = p->sequences, heads = p->kv_heads;
    AttentionPlan *plan = malloc(sizeof *plan + sizeof(int64_t) * (size_t)(2 * count + 1) +
                                 sizeof(int32_t) * (size_t)(count * heads));
    if (!plan) return 0;
    plan->before = (int64_t *)(plan + 1), plan->states = plan->before + count + 1;
    plan->left = (int32_t *)(plan->states + count);
    plan->before[0] = 0;
    for (int i = 0; i < count; i++) {
        int spans = spans_of(p, i), tokens = p->starts[i + 1] - p->starts[i];
        int64_t tiles = spans > 1 ? spans : (tokens + queries - 1) / queries;
        plan->before[i + 1] = plan->before[i] + tiles;
        plan->states[i] = spread;
        if (spans > 1) spread += spans * heads * size;
        for (int64_t h = 0; h < heads; h++) plan->left[i * heads + h] = spans;
    }
    plan->parts = aligned_alloc(64, (sizeof(float) * (size_t)spread / 64 + 1) * 64);
    if (plan->parts) return plan;
    free(plan);
    return 0;
}

void end_plan(AttentionPlan *plan) {
    if (!plan) return;
    free(plan->parts);
    free(plan);
}

static int owner_of(const int64_t *before, int count, int64_t tile) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (before[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

static void run_item(const Problem *p, AttentionPlan *plan, int64_t item, Scratch *s,
                     int bf16) {
    int group = p->heads / p->kv_heads, queries = ROWS / group;
    int sequence = owner_of(plan->before, p->sequences, item / p->kv_heads);
    int which = (int)(item / p->kv_heads - plan->before[sequence]), spans = spans_of(p, sequence);
    Tile t = {.sequence = sequence, .head = (int)(item % p->kv_heads), .queries = 1};
    if (spans > 1) {
        int64_t size = (int64_t)spans * state_size(group, whole_vectors(p->dim));
        float *parts = plan->parts + plan->states[sequence] + t.head * size;
        int32_t *left = plan->left + (int64_t)sequence * p->kv_heads + t.head;
        attend_span(p, t, which, spans, parts, left, s, bf16);
        return;
    }
    t.first_query = which * queries;
    int rest = p->starts[sequence + 1] - p->starts[sequence] - t.first_query;
    t.queries = rest < queries ? rest : queries;
    attend(p, t, s, bf16);
}

/* Marks the team as failed where memory for the scratch was refused. */
void attention_part(Team *t, const Problem *p, AttentionPlan *plan, int32_t bf16) {
    int64_t items = plan->before[p->sequences] * p->kv_heads;
    Scratch *scratch = 0;
    /* The last tiles of a prefill see the most keys: they go first. */
    for (int64_t i; (i = items - 1 - claim(t)) >= 0;) {
        if (!scratch) scratch = aligned_alloc(64, (sizeof(Scratch) + 63) / 64 * 64);
        if (scratch) run_item(p, plan, i, scratch, bf16);
        else __atomic_store_n(&t->failed, 1, __ATOMIC_RELAXED);
    }
    free(scratch);
}

/* Returns 0, or -1 where memory was refused. */
EXPORT int32_t rollout_paged_attention(const Problem *p, int32_t bf16, int32_t threads) {
    Team team = {0};
    AttentionPlan *plan = plan_attention(p);
    if (!plan) return -1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    attention_part(&team, p, plan, bf16);
    end_plan(plan);
    return team.failed ? -1 : 0;
}
