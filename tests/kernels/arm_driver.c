/* Runs one kernel on what stdin holds: the number of integers, the integers (int64), then each
 * buffer as its length (int64) and its bytes. The result goes to stdout. */
#include "attention.c"

#include <stdio.h>

void rollout_linear(const uint16_t *x, int64_t x_row, const uint16_t *w, const uint16_t *bias,
                    void *out, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                    int32_t segments, int32_t wide, int32_t level, int32_t threads);
uint64_t rollout_digest(const void *data, int32_t size, int64_t rows, int64_t columns,
                        int64_t row_stride, int64_t column_stride, uint64_t position,
                        uint64_t position_stride, int32_t threads, uint64_t exponent,
                        uint64_t *bad);

static void get(void *to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(2);
}

static void *buffer(void) {
    int64_t size;
    get(&size, 8);
    if (!size) return NULL;
    void *bytes = malloc((size_t)size);
    get(bytes, (size_t)size);
    return bytes;
}

int main(int count, char **words) {
    int64_t n, i[16];
    get(&n, 8);
    get(i, (size_t)n * 8);
    if (count < 2) return 2;
    if (!strcmp(words[1], "digest")) {
        void *data = buffer();
        uint64_t bad, sum = rollout_digest(data, (int32_t)i[0], i[1], i[2], i[3], i[4], (uint64_t)i[5],
                                      (uint64_t)i[6], 1, (uint64_t)i[7], &bad);
        fwrite(&sum, 8, 1, stdout);
        fwrite(&bad, 8, 1, stdout);
    } else if (!strcmp(words[1], "linear")) {
        size_t size = (size_t)(i[0] * i[1] * 2);
        void *x = buffer(), *w = buffer(), *bias = buffer(), *out = malloc(size);
        rollout_linear(x, i[2], w, bias, out, i[0], i[1], i[2], 0, 1, 0, 0, 1);
        fwrite(out, 1, size, stdout);
    } else {
        Problem p = {.q_row = i[0], .q_head = i[1], .kv_block = i[2], .kv_head = i[3],
                     .sequences = (int32_t)i[4], .heads = (int32_t)i[5], .kv_heads = (int32_t)i[6],
                     .dim = (int32_t)i[7], .block = (int32_t)i[8], .table_width = (int32_t)i[9]};
        size_t size = (size_t)i[11];
        p.q = buffer(), p.k = buffer(), p.v = buffer();
        p.starts = buffer(), p.lengths = buffer(), p.tables = buffer();
        float *scale = buffer();
        p.scale = *scale, p.out = malloc(size);
        if (rollout_paged_attention(&p, (int32_t)i[10], 1)) return 3;
        fwrite(p.out, 1, size, stdout);
    }
    return 0;
}
