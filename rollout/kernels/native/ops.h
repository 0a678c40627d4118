/* Ops that blocks.c calls itself, beside Python. */
#ifndef ROLLOUT_OPS_H
#define ROLLOUT_OPS_H

#include "team.h"

#include <stdint.h>

/* Causal attention over pages; see attention.c. `window`: keys that a query sees, itself included,
 * or 0 for all. `softcap`: scores become softcap * tanh(score / softcap), or 0. `sinks`: a score
 * of each query head that takes its share of the softmax and has no value, or null. `codes`: what
 * pages hold, as in kv_codes.h. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    const int32_t *starts, *lengths, *tables;
    const float *sinks, *k_scales, *v_scales; /* scales: of codes */
    int64_t q_row, q_head; /* strides in elements */
    int64_t kv_block, kv_head;
    int32_t sequences, heads, kv_heads, dim, block, table_width, window, codes;
    float scale, softcap;
} Problem;

/* How a problem is cut into items, with memory for what they leave each other. Good for all
 * problems of the same shape, starts and lengths, one after the other. Null: no memory. */
typedef struct AttentionPlan AttentionPlan;
AttentionPlan *plan_attention(const Problem *p);
void end_plan(AttentionPlan *plan);

/* Rope, and keys and values into their pages; v is null where values are a part of the keys. */
typedef struct {
    const char *q, *k, *v, *cos, *sin; /* cos, sin: [tokens, width], dense */
    char *out, *k_cache, *v_cache;     /* q rotated, dense; caches [blocks, heads, block, dim] */
    float *k_scales, *v_scales;        /* [blocks, heads, block], of codes */
    const int64_t *slots;
    int64_t q_outer, q_inner, k_outer, k_inner, v_outer, v_inner; /* elements */
    int64_t tokens, heads, kv_heads, dim, width, block, codes;
} Turn;

/* Root-mean-square norm of x, or of x + residual, which goes to `total`. Vector i of x lies at
 * (i / heads) * outer + (i % heads) * inner elements; the others are dense. */
typedef struct {
    const void *x, *residual, *weight; /* residual may be null */
    void *out, *total;
    int64_t outer, inner, rows, heads, dim;
    float eps, offset; /* offset: added to the weight */
    int32_t wide;      /* the weight multiplies before anything is rounded */
} Norm;

/* What each thread of a team calls; the op is done when they have met. */
void norm_part(Team *t, const Norm *p, int32_t bf16);
void turn_part(Team *t, const Turn *p, int32_t bf16, int32_t wide);
void attention_part(Team *t, const Problem *p, AttentionPlan *plan, int32_t bf16);
void linear_part(Team *t, const uint16_t *x, int64_t x_row, const uint16_t *w, const uint16_t *bias,
                 void *out, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                 int32_t segments, int32_t wide, int32_t level, int32_t threads);
/* A weight in int8; see int8.c. */
void int8_part(Team *t, const uint16_t *x, int64_t x_row, const int8_t *w, const float *scale,
               const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outputs, int64_t inputs,
               int32_t gated, int32_t threads);

#endif
