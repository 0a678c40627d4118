/* Ops that blocks.c calls itself, beside Python. */
#ifndef ROLLOUT_OPS_H
#define ROLLOUT_OPS_H

#include <stdint.h>

/* Causal attention over pages; see attention.c. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    const int32_t *starts, *lengths, *tables;
    int64_t q_row, q_head; /* strides in elements */
    int64_t kv_block, kv_head;
    int32_t sequences, heads, kv_heads, dim, block, table_width;
    float scale;
} Problem;

/* Rope, and keys and values into their pages; see pointwise.c. */
typedef struct {
    const char *q, *k, *v, *cos, *sin; /* cos, sin: [tokens, width], dense */
    char *out, *k_cache, *v_cache;     /* q rotated, dense; caches [blocks, heads, block, dim] */
    const int64_t *slots;
    int64_t q_outer, q_inner, k_outer, k_inner, v_outer, v_inner; /* elements */
    int64_t tokens, heads, kv_heads, dim, width, block;
} Turn;

void rollout_rms_norm(const void *x, int64_t outer, int64_t inner, const void *weight, void *out,
                      int64_t rows, int64_t heads, int64_t dim, float eps, int32_t bf16,
                      int32_t threads);
void rollout_add_rms_norm(const void *x, const void *residual, const void *weight, void *out,
                          void *total, int64_t rows, int64_t dim, float eps, int32_t bf16,
                          int32_t threads);
void rollout_rotary_store(const Turn *p, int32_t bf16, int32_t wide, int32_t threads);
int32_t rollout_paged_attention(const Problem *p, int32_t bf16, int32_t threads);
void rollout_linear(const uint16_t *x, int64_t x_row, const uint16_t *w, const uint16_t *bias,
                    uint16_t *out, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                    int32_t level, int32_t threads);

#endif
