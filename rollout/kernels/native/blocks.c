/* Decoder blocks of bfloat16, op after op: what models/decoder/blocks.py composes, without Python
 * and fresh tensors between the ops. The ops are those of the other files, so the bits are the same. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "ops.h"
#include "vec.h"

typedef struct {
    const uint16_t *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    const uint16_t *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *qkv_scale, *o_scale, *gate_up_scale, *down_scale;
    void *k_cache, *v_cache;
    float *k_scales, *v_scales; /* null but of codes */
} Block; /* weights in tiles, of int8 where they have scales; biases, scales and the
          * norms of q and k may be null */

typedef struct {
    const Block *blocks;
    uint16_t *residual; /* [tokens, hidden]: the embeddings; then all but the last block's output */
    uint16_t *out;      /* [tokens, hidden]: the last block's output */
    uint16_t *work;     /* tokens x the larger of inner and of q, k, v and q's columns (+ q, k) */
    const void *cos, *sin;
    const int64_t *slots;
    const int32_t *starts, *lengths, *tables;
    int64_t tokens, sequences, hidden, inner, heads, kv_heads, dim, rotary, page;
    int64_t table_width;
    int64_t window;     /* keys that a query sees, or 0 for all */
    int64_t codes;      /* what pages hold, as in kv_codes.h */
    int64_t begin, end; /* halves to run: 2 i is the attention of block i, 2 i + 1 what follows */
    float *sums;        /* [tokens, hidden]: what o and down give instead, or null */
    float eps, scale;
    int32_t o_segments, down_segments; /* of their inputs; see linear_common.h */
    int32_t wide, level, threads; /* wide: cos and sin are float32 */
} Blocks;

/* A thread of the team, and how many there are. */
typedef struct {
    Team *team;
    AttentionPlan *plan; /* null where no attention runs */
    int32_t size;
} Thread;

static void multiply(Thread t, const Blocks *p, const uint16_t *x, const uint16_t *w,
                     const float *scale, const uint16_t *bias, uint16_t *out, int64_t outputs,
                     int64_t inputs, int gated) {
    if (scale)
        int8_part(t.team, x, inputs, (const int8_t *)w, scale, bias, out, p->tokens, outputs,
                  inputs, gated, t.size);
    else
        linear_part(t.team, x, inputs, w, bias, out, p->tokens, outputs, inputs, gated, 1, 0,
                    p->level, t.size);
    meet(t.team, t.size);
}

/* out, or the sums that it is one rank's part of. */
static void multiply_back(Thread t, const Blocks *p, const uint16_t *x, const uint16_t *w,
                          const float *scale, const uint16_t *bias, int64_t inputs,
                          int32_t segments) {
    if (scale) {
        multiply(t, p, x, w, scale, bias, p->out, p->hidden, inputs, 0);
        return;
    }
    void *out = p->sums ? (void *)p->sums : p->out;
    linear_part(t.team, x, inputs, w, bias, out, p->tokens, p->hidden, inputs, 0, segments,
                p->sums != 0, p->level, t.size);
    meet(t.team, t.size);
}

/* out = norm(out + residual), residual = out + residual; of the first block norm(residual). */
static void normalise(Thread t, const Blocks *p, const uint16_t *weight, int first) {
    Norm norm = {.x = p->out, .residual = p->residual, .weight = weight, .out = p->out};
    norm.total = p->residual, norm.outer = p->hidden, norm.rows = p->tokens, norm.heads = 1;
    norm.dim = p->hidden, norm.eps = p->eps;
    if (first) norm.x = p->residual, norm.residual = 0;
    norm_part(t.team, &norm, 1);
    meet(t.team, t.size);
}

/* Heads of the fused projection, normalised into dense ones. */
static void normalise_heads(Thread t, const Blocks *p, const uint16_t *x, int64_t columns,
                            const uint16_t *weight, uint16_t *out, int64_t heads) {
    Norm norm = {.x = x, .weight = weight, .out = out, .outer = columns, .inner = p->dim};
    norm.rows = p->tokens * heads, norm.heads = heads, norm.dim = p->dim, norm.eps = p->eps;
    norm_part(t.team, &norm, 1);
    meet(t.team, t.size);
}

/* Attention of any block, but for where its tensors lie. */
static Problem attention_problem(const Blocks *p) {
    Problem a = {.starts = p->starts, .lengths = p->lengths, .tables = p->tables};
    a.q_row = p->heads * p->dim, a.q_head = p->dim;
    a.kv_head = p->page * p->dim, a.kv_block = p->kv_heads * a.kv_head;
    a.sequences = (int32_t)p->sequences, a.table_width = (int32_t)p->table_width;
    a.heads = (int32_t)p->heads, a.kv_heads = (int32_t)p->kv_heads;
    a.dim = (int32_t)p->dim, a.block = (int32_t)p->page, a.scale = p->scale;
    a.window = (int32_t)p->window, a.codes = (int32_t)p->codes;
    return a;
}

/* out = attention(out); the work area holds q, k, v, then q rotated, then q and k normalised. */
static void attend(Thread t, const Blocks *p, const Block *b) {
    int64_t q_columns = p->heads * p->dim, kv_columns = p->kv_heads * p->dim;
    int64_t columns = q_columns + 2 * kv_columns, q_row = columns, k_row = columns;
    uint16_t *qkv = p->work, *turned = qkv + p->tokens * columns;
    const uint16_t *q = qkv, *k = qkv + q_columns;
    multiply(t, p, p->out, b->qkv, b->qkv_scale, b->qkv_bias, qkv, columns, p->hidden, 0);
    if (b->q_norm) {
        uint16_t *q_to = turned + p->tokens * q_columns, *k_to = q_to + p->tokens * q_columns;
        normalise_heads(t, p, q, columns, b->q_norm, q_to, p->heads);
        normalise_heads(t, p, k, columns, b->k_norm, k_to, p->kv_heads);
        q = q_to, k = k_to, q_row = q_columns, k_row = kv_columns;
    }
    Turn turn = {.q = (const char *)q, .k = (const char *)k, .cos = p->cos, .sin = p->sin};
    turn.v = (const char *)(qkv + q_columns + kv_columns), turn.out = (char *)turned;
    turn.k_cache = b->k_cache, turn.v_cache = b->v_cache, turn.slots = p->slots;
    turn.k_scales = b->k_scales, turn.v_scales = b->v_scales, turn.codes = p->codes;
    turn.q_outer = q_row, turn.k_outer = k_row, turn.v_outer = columns;
    turn.q_inner = turn.k_inner = turn.v_inner = p->dim;
    turn.tokens = p->tokens, turn.heads = p->heads, turn.kv_heads = p->kv_heads;
    turn.dim = p->dim, turn.width = p->rotary, turn.block = p->page;
    turn_part(t.team, &turn, 1, p->wide);
    meet(t.team, t.size);

    Problem problem = attention_problem(p);
    problem.q = turned, problem.k = b->k_cache, problem.v = b->v_cache;
    problem.k_scales = b->k_scales, problem.v_scales = b->v_scales;
    problem.out = qkv; /* q, k and v are no longer needed */
    attention_part(t.team, &problem, t.plan, 1);
    meet(t.team, t.size);
    multiply_back(t, p, qkv, b->o, b->o_scale, b->o_bias, q_columns, p->o_segments);
}

static void run(Thread t, const Blocks *p) {
    for (int64_t half = p->begin; half < p->end && !t.team->failed; half++) {
        const Block *b = p->blocks + half / 2;
        normalise(t, p, half % 2 ? b->post_norm : b->input_norm, !half);
        if (half % 2 == 0) {
            attend(t, p, b);
            continue;
        }
        multiply(t, p, p->out, b->gate_up, b->gate_up_scale, b->gate_up_bias, p->work, 2 * p->inner, p->hidden, 1);
        multiply_back(t, p, p->work, b->down, b->down_scale, b->down_bias, p->inner, p->down_segments);
    }
}

/* Threads of this process that can run at once. */
static int32_t cores(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return INT32_MAX;
}

/* Returns 0, or -1 where memory was refused. */
EXPORT int32_t rollout_decoder_blocks(const Blocks *p) {
    Team team = {.crowded = cores() < p->threads};
    Problem shape = attention_problem(p);
    AttentionPlan *plan = 0;
    int attends = p->begin % 2 == 0 || p->end - p->begin > 1;
    if (attends && !(plan = plan_attention(&shape))) return -1;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    run((Thread){&team, plan, omp_get_num_threads()}, p);
    end_plan(plan);
    return team.failed ? -1 : 0;
}
