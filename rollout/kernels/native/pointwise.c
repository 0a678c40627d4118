/* The small ops between the matrix products. Rows may be strided; the last dimension is dense.
 * `rows` counts vectors: vector i lies at (i / heads) * outer + (i % heads) * inner elements. */
#include "kv_codes.h"
#include "ops.h"
#include "vec.h"

#define PARALLEL_ELEMENTS 65536 /* below this the threads cost more than they save */
#define PART 4096               /* elements that a thread claims at once */

INLINE const void *at(const void *p, int64_t i, int bf16) {
    return (const char *)p + i * (bf16 ? 2 : 4);
}

INLINE void norm_row(const void *x, const void *residual, void *total, const void *weight,
                     void *out, const Norm *p, int bf16) {
    int64_t dim = p->dim;
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += VW) {
        vf v = load_at(x, d, dim, bf16);
        if (residual) {
            v = round_to(v + load_at(residual, d, dim, bf16), bf16);
            store_at(total, d, dim, v, bf16);
        }
        squares = fused(v, v, squares);
    }
    vf scale = splat(1.0f / sqrtf(reduce_sum(squares) / (float)dim + p->eps));
    const void *in = residual ? total : x;
    for (int64_t d = 0; d < dim; d += VW) {
        vf v = load_at(in, d, dim, bf16) * scale, w = load_at(weight, d, dim, bf16);
        if (p->wide) store_at(out, d, dim, v * (w + p->offset), bf16);
        else store_at(out, d, dim, round_to(v, bf16) * w, bf16);
    }
}

INLINE void norm(Team *t, const Norm *p, int bf16) {
    int64_t share = p->dim < PART ? PART / p->dim : 1;
    for (int64_t first; (first = claim(t) * share) < p->rows;)
        for (int64_t i = first; i < first + share && i < p->rows; i++)
            norm_row(at(p->x, i / p->heads * p->outer + i % p->heads * p->inner, bf16),
                     p->residual ? at(p->residual, i * p->dim, bf16) : 0,
                     (void *)at(p->total, i * p->dim, bf16), p->weight,
                     (void *)at(p->out, i * p->dim, bf16), p, bf16);
}

void norm_part(Team *t, const Norm *p, int32_t bf16) {
    if (bf16) norm(t, p, 1);
    else norm(t, p, 0);
}

static void run_norm(const Norm *p, int32_t bf16, int32_t threads) {
    Team team = {0};
    if (p->rows * p->dim < PARALLEL_ELEMENTS) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    norm_part(&team, p, bf16);
}

EXPORT void rollout_rms_norm(const void *x, int64_t outer, int64_t inner, const void *weight,
                             void *out, int64_t rows, int64_t heads, int64_t dim, float eps,
                             float offset, int32_t wide, int32_t bf16, int32_t threads) {
    Norm p = {.x = x, .weight = weight, .out = out, .outer = outer, .inner = inner, .rows = rows};
    p.heads = heads, p.dim = dim, p.eps = eps, p.offset = offset, p.wide = wide;
    run_norm(&p, bf16, threads);
}

EXPORT void rollout_add_rms_norm(const void *x, const void *residual, const void *weight, void *out,
                                 void *total, int64_t rows, int64_t dim, float eps, float offset,
                                 int32_t wide, int32_t bf16, int32_t threads) {
    Norm p = {.x = x, .residual = residual, .weight = weight, .out = out, .total = total};
    p.outer = dim, p.rows = rows, p.heads = 1, p.dim = dim, p.eps = eps;
    p.offset = offset, p.wide = wide;
    run_norm(&p, bf16, threads);
}

/* One head: the rotated pair (i, i + half), every product and the sum rounded as torch does. */
INLINE void rotate_head(const void *x, const void *cos, const void *sin, void *out, int64_t dim,
                        int64_t width, int bf16, int wide) {
    int64_t half = width / 2, size = bf16 ? 2 : 4;
    int table = bf16 && !wide; /* cos and sin are bfloat16 */
    for (int64_t i = 0; i < half; i += VW) {
        vf a = load_at(x, i, half, bf16), b = load_at(at(x, half, bf16), i, half, bf16);
        vf c0 = load_at(cos, i, half, table), c1 = load_at(at(cos, half, table), i, half, table);
        vf s0 = load_at(sin, i, half, table), s1 = load_at(at(sin, half, table), i, half, table);
        vf low = round_to(a * c0, table) - round_to(b * s0, table);
        vf high = round_to(b * c1, table) + round_to(a * s1, table);
        store_at(out, i, half, low, bf16);
        store_at((void *)at(out, half, bf16), i, half, high, bf16);
    }
    if (dim > width)
        memcpy((char *)out + width * size, (const char *)x + width * size,
               (size_t)((dim - width) * size));
}

INLINE void gate(const void *x, int64_t stride, void *out, int64_t rows, int64_t dim, int threads,
                 int bf16) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const void *g = at(x, i * stride, bf16), *up = at(g, dim, bf16);
        void *row = (void *)at(out, i * dim, bf16);
        for (int64_t d = 0; d < dim; d += VW) {
            vf v = load_at(g, d, dim, bf16);
            store_at(row, d, dim, silu(v, bf16) * load_at(up, d, dim, bf16), bf16);
        }
    }
}

EXPORT void rollout_silu_mul(const void *x, int64_t stride, void *out, int64_t rows, int64_t dim,
                      int32_t bf16, int32_t threads) {
    if (rows * dim < PARALLEL_ELEMENTS) threads = 1;
    if (bf16) gate(x, stride, out, rows, dim, threads, 1);
    else gate(x, stride, out, rows, dim, threads, 0);
}

/* x [dim] as codes; returns their scale, which is NaN where an element is not finite. */
static float to_codes(const void *x, int64_t dim, int bf16, int kind, char *to) {
    vf most = splat(0), bad = splat(0);
    for (int64_t d = 0; d < dim; d += VW) {
        vf v = load_at(x, d, dim, bf16);
        most = vmax(most, (vf)((vi)v & 0x7fffffff));
        bad += v - v;
    }
    float top = reduce_max(most), largest = kind == E4M3 ? 448 : 127;
    if (!(top > 1e-30f)) top = 1e-30f;
    vf by = splat(largest / top);
    for (int64_t d = 0; d < dim; d += VW) {
        vf v = load_at(x, d, dim, bf16) * by;
        vi codes = kind == E4M3 ? to_e4m3(v) : rounded(v);
        store_bytes((uint8_t *)to + d, codes, dim - d < VW ? (int)(dim - d) : VW);
    }
    return top / largest + reduce_sum(bad);
}

INLINE void turn(const Turn *p, int64_t t, int bf16, int wide) {
    int64_t size = bf16 ? 2 : 4, table = bf16 && !wide ? 2 : 4;
    const char *cos = p->cos + t * p->width * table, *sin = p->sin + t * p->width * table;
    for (int64_t h = 0; h < p->heads; h++)
        rotate_head(p->q + (t * p->q_outer + h * p->q_inner) * size, cos, sin,
                    p->out + (t * p->heads + h) * p->dim * size, p->dim, p->width, bf16, wide);
    int64_t page = p->slots[t] / p->block, offset = p->slots[t] % p->block;
    for (int64_t h = 0; h < p->kv_heads; h++) {
        int64_t at = (page * p->kv_heads + h) * p->block + offset, to = at * p->dim;
        const char *k = p->k + (t * p->k_outer + h * p->k_inner) * size;
        const char *v = p->v ? p->v + (t * p->v_outer + h * p->v_inner) * size : 0;
        if (p->codes) {
            float turned[MAX_CODED];
            rotate_head(k, cos, sin, turned, p->dim, p->width, bf16, wide);
            p->k_scales[at] = to_codes(turned, p->dim, bf16, (int)p->codes, p->k_cache + to);
            if (v) p->v_scales[at] = to_codes(v, p->dim, bf16, (int)p->codes, p->v_cache + to);
            continue;
        }
        rotate_head(k, cos, sin, p->k_cache + to * size, p->dim, p->width, bf16, wide);
        if (v) memcpy(p->v_cache + to * size, v, (size_t)(p->dim * size)); /* else part of k */
    }
}

void turn_part(Team *team, const Turn *p, int32_t bf16, int32_t wide) {
    int64_t token = (p->heads + p->kv_heads) * p->dim, share = token < PART ? PART / token : 1;
    for (int64_t first; (first = claim(team) * share) < p->tokens;)
        for (int64_t t = first; t < first + share && t < p->tokens; t++)
            if (!bf16) turn(p, t, 0, 0);
            else if (wide) turn(p, t, 1, 1);
            else turn(p, t, 1, 0);
}

EXPORT void rollout_rope_and_cache(const Turn *p, int32_t bf16, int32_t wide, int32_t threads) {
    Team team = {0};
    if (p->tokens * (p->heads + p->kv_heads) * p->dim < PARALLEL_ELEMENTS) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    turn_part(&team, p, bf16, wide);
}
