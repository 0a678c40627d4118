/* A row of logits in two passes: its maximum, then sums of exponentials by segment. */
#include "vec.h"

#define SEGMENT 512
#define PARALLEL_ELEMENTS 65536

/* A temperature of 0 stands for 1: a division costs more than all the rest. */
INLINE vf scaled(const void *x, int64_t i, int64_t size, float temperature, int bf16) {
    vf v = load_at(x, i, size, bf16);
    if (temperature != 0) v /= temperature;
    if (i + VW <= size) return v;
    return blend(LANES + (int32_t)i < (int32_t)size, v, splat(-INFINITY));
}

INLINE void scan_row(const void *x, float temperature, float *best, int64_t *id, float *sums,
                     double *mass, int64_t size, int bf16) {
    float top = -INFINITY;
    int64_t from = 0;
    for (int64_t s = 0; s < size; s += SEGMENT) {
        vf high = splat(-INFINITY);
        int64_t stop = s + SEGMENT < size ? s + SEGMENT : size;
        for (int64_t i = s; i < stop; i += VW)
            high = vmax(high, scaled(x, i, size, temperature, bf16));
        float peak = reduce_max(high);
        if (peak > top) top = peak, from = s;
    }
    int64_t at = from;
    for (int64_t i = from; i < size && i < from + SEGMENT; i += VW) {
        vi equal = scaled(x, i, size, temperature, bf16) == top;
        int lane = 0;
        while (lane < VW && !equal[lane]) lane++;
        at = i + lane;
        if (lane < VW) break;
    }
    *best = top, *id = at < size ? at : size - 1;
    double total = 0;
    for (int64_t s = 0; s < size; s += SEGMENT) {
        vf sum = splat(0), more = splat(0);
        int64_t stop = s + SEGMENT < size ? s + SEGMENT : size;
        for (int64_t i = s; i < stop; i += 2 * VW) {
            sum += exp_negative(scaled(x, i, size, temperature, bf16) - top);
            if (i + VW < stop)
                more += exp_negative(scaled(x, i + VW, size, temperature, bf16) - top);
        }
        sums[s / SEGMENT] = reduce_sum(sum + more);
        total += sums[s / SEGMENT];
    }
    *mass = total;
}

INLINE void scan(const void *x, int64_t stride, const float *temperature, float *best, int64_t *ids,
                 float *sums, double *mass, int64_t rows, int64_t size, int threads, int bf16) {
    int64_t segments = (size + SEGMENT - 1) / SEGMENT;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
        const void *row = (const char *)x + r * stride * (bf16 ? 2 : 4);
        float *out = sums + r * segments;
        if (temperature && temperature[r] != 1)
            scan_row(row, temperature[r], best + r, ids + r, out, mass + r, size, bf16);
        else scan_row(row, 0, best + r, ids + r, out, mass + r, size, bf16);
    }
}

/* `temperature` may be null; `sums` is [rows, ceil(size / SEGMENT)]; size > 0. */
EXPORT void rollout_scan_logits(const void *x, int64_t stride, const float *temperature,
                                float *best, int64_t *ids, float *sums, double *mass, int64_t rows,
                                int64_t size, int32_t bf16, int32_t threads) {
    if (rows * size < PARALLEL_ELEMENTS) threads = 1;
    if (bf16) scan(x, stride, temperature, best, ids, sums, mass, rows, size, threads, 1);
    else scan(x, stride, temperature, best, ids, sums, mass, rows, size, threads, 0);
}
