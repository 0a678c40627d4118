/* What min_p, top_k and top_p keep of a row of logits: everything from one edge up.
 *
 * The largest logit of each block of BLOCK tells which blocks can hold a candidate, so that a row
 * is read once and then only where it is high. Among candidates the edge is selected, not sorted
 * for. Exact: bins and blocks only narrow down where it lies. */
#include "area.h"
#include "vec.h"

#define SEGMENT 512
#define BLOCK 64
#define BINS 1024
#define FEW 2048      /* candidates that need no bins */
#define NEAR 12.0f    /* below the best: what a nucleus usually ends within */
#define PARALLEL_ELEMENTS 65536

typedef struct {
    const void *x;
    float temperature, best; /* a temperature of 0 stands for 1 */
    int64_t size, blocks;
    int bf16;
    float *peaks;      /* [blocks] */
    float *found;      /* [size + VW] candidates, in the vocabulary's order */
    int64_t count;
} Row;

/* Past the end minus infinity. */
INLINE vf scaled(const Row *row, int64_t i, int bf16) {
    vf v = load_at(row->x, i, row->size, bf16);
    if (row->temperature != 0) v /= row->temperature;
    if (i + VW <= row->size) return v;
    return blend(LANES + (int32_t)i < (int32_t)row->size, v, splat(-INFINITY));
}

INLINE int64_t end_of(const Row *row, int64_t block) {
    return (block + 1) * BLOCK < row->size ? (block + 1) * BLOCK : row->size;
}

INLINE void find_peaks(Row *row, int bf16) {
    for (int64_t b = 0; b < row->blocks; b++) {
        vf high = splat(-INFINITY);
        int64_t end = end_of(row, b);
        for (int64_t i = b * BLOCK; i < end; i += VW) high = vmax(high, scaled(row, i, bf16));
        row->peaks[b] = reduce_max(high);
    }
}

/* found = every logit from `edge` up. */
INLINE void collect(Row *row, float edge, int bf16) {
    float *to = row->found;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (!(row->peaks[b] >= edge)) continue;
        int64_t end = end_of(row, b);
        for (int64_t i = b * BLOCK; i < end; i += VW) {
            vf v = scaled(row, i, bf16);
            int lanes = end - i < VW ? (int)(end - i) : VW;
#if VW == 16
            uint32_t mask = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(edge), _CMP_GE_OQ);
            mask &= (uint32_t)((1u << lanes) - 1);
            _mm512_mask_compressstoreu_ps(to, (__mmask16)mask, (__m512)v);
            to += __builtin_popcount(mask);
#else
            for (int j = 0; j < lanes; j++) {
                *to = v[j];
                to += v[j] >= edge;
            }
#endif
        }
    }
    row->count = to - row->found;
}

/* The k-th largest of n >= k >= 1 values, which are moved about. */
static float kth_largest(float *v, int64_t n, int64_t k) {
    while (n > 1) {
        float a = v[0], b = v[n / 2], c = v[n - 1];
        float pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t above = 0, at = 0, below = n; /* above | equal | unseen | below */
        while (at < below) {
            float x = v[at];
            if (x > pivot) v[at++] = v[above], v[above++] = x;
            else if (x < pivot) v[at] = v[--below], v[below] = x;
            else at++;
        }
        if (k <= above) n = above;
        else if (k <= below) return pivot;
        else v += below, n -= below, k -= below;
    }
    return v[0];
}

/* Sum of e^(v - best) over n values; v [n + VW] may be written past its end. */
static double mass_of(float *v, int64_t n, float best) {
    double total = 0;
    for (int j = 0; j < VW; j++) v[n + j] = -INFINITY;
    for (int64_t i = 0; i < n; i += BLOCK) {
        vf sum = splat(0);
        for (int64_t j = i; j < n && j < i + BLOCK; j += VW)
            sum += exp_negative(load(v, j, 0) - best);
        total += reduce_sum(sum);
    }
    return total;
}

typedef struct {
    float x, mass;
} Weighed;

/* The least of n values that has less than `wanted` mass above it, `above` of it outside. */
static float edge_among(Weighed *v, int64_t n, double above, double wanted) {
    for (;;) {
        float pivot = v[n / 2].x;
        int64_t more = 0, at = 0, below = n;
        double heavier = 0, equal = 0;
        while (at < below) {
            Weighed w = v[at];
            if (w.x > pivot) heavier += w.mass, v[at++] = v[more], v[more++] = w;
            else if (w.x < pivot) v[at] = v[--below], v[below] = w;
            else equal += w.mass, at++;
        }
        if (above + heavier >= wanted && more) n = more;
        else if (above + heavier + equal >= wanted || below == n) return pivot;
        else above += heavier + equal, v += below, n -= below;
    }
}

INLINE int bin_of(float x, float best, float per_bin) {
    float bin = (best - x) * per_bin;
    return bin < BINS - 1 ? (int)bin : BINS - 1;
}

/* The edge of a nucleus of `wanted` mass among the candidates, all of them at least `low`. */
static float nucleus(Row *row, float low, double wanted) {
    float *v = row->found, best = row->best;
    if (low == -INFINITY) { /* what is further away weighs nothing */
        low = best;
        for (int64_t i = 0; i < row->count; i++)
            if (v[i] < low && v[i] > best + EXP_LOW) low = v[i];
    }
    float per_bin = best > low ? (BINS - 1) / (best - low) : 0;
    double masses[BINS] = {0}, above = 0;
    int chosen = BINS;
    if (row->count > FEW) {
        for (int64_t i = 0; i < row->count; i += VW) {
            vf x = load(v, i, 0), mass = exp_negative(x - best);
            for (int j = 0; j < VW && i + j < row->count; j++)
                masses[bin_of(x[j], best, per_bin)] += mass[j];
        }
        for (chosen = 0; chosen < BINS - 1 && above + masses[chosen] < wanted; chosen++)
            above += masses[chosen];
    }
    Weighed *inside = (Weighed *)(v + row->size + VW);
    int64_t n = 0;
    for (int64_t i = 0; i < row->count; i += VW) {
        vf x = load(v, i, 0), mass = exp_negative(x - best);
        for (int j = 0; j < VW && i + j < row->count; j++) {
            inside[n] = (Weighed){x[j], mass[j]};
            n += chosen == BINS || bin_of(x[j], best, per_bin) == chosen;
        }
    }
    return n ? edge_among(inside, n, above, wanted) : low;
}

/* Sums of e^(x - best) over what is kept, by segment; returns their total. */
INLINE double sum_kept(const Row *row, float edge, float *sums, int bf16) {
    double total = 0;
    for (int64_t s = 0; s * SEGMENT < row->size; s++) {
        vf sum = splat(0);
        for (int64_t b = s * (SEGMENT / BLOCK); b < row->blocks && b < (s + 1) * (SEGMENT / BLOCK);
             b++) {
            if (!(row->peaks[b] >= edge)) continue;
            int64_t end = end_of(row, b);
            for (int64_t i = b * BLOCK; i < end; i += VW) {
                vf x = scaled(row, i, bf16);
                sum += blend(x >= edge, exp_negative(x - row->best), splat(0));
            }
        }
        sums[s] = reduce_sum(sum);
        total += sums[s];
    }
    return total;
}

INLINE float edge_of(Row *row, int64_t top_k, double top_p, float min_p, double mass, int bf16) {
    float edge = min_p > 0 ? (float)((double)row->best + log((double)min_p)) : -INFINITY;
    find_peaks(row, bf16);
    if (top_k > 0 && top_k < row->size) {
        float low = edge;
        if (top_k <= row->blocks) { /* so many logits are at least the k-th of the peaks */
            memcpy(row->found, row->peaks, sizeof(float) * (size_t)row->blocks);
            float peak = kth_largest(row->found, row->blocks, top_k);
            if (peak > low) low = peak;
        }
        collect(row, low, bf16);
        if (row->count > top_k) {
            float kth = kth_largest(row->found, row->count, top_k);
            if (kth > edge) edge = kth;
        } else if (low > edge) {
            edge = low;
        }
    }
    if (!(top_p < 1)) return edge;
    if (edge > -INFINITY) {
        collect(row, edge, bf16);
        return nucleus(row, edge, top_p * mass_of(row->found, row->count, row->best));
    }
    collect(row, row->best - NEAR, bf16);
    if (mass_of(row->found, row->count, row->best) > top_p * mass)
        return nucleus(row, row->best - NEAR, top_p * mass);
    collect(row, edge, bf16);
    return nucleus(row, edge, top_p * mass_of(row->found, row->count, row->best));
}

/* edges [rows], sums [rows, ceil(size / SEGMENT)] and mass [rows] come in as scan_logits gives
 * them, and leave as what is kept; rows without a filter or with a NaN keep theirs. `temperature`
 * may be null. */
EXPORT void rollout_filter_logits(const void *x, int64_t stride, const float *temperature,
                                  const float *best, const int64_t *top_k, const double *top_p,
                                  const float *min_p, float *edges, float *sums, double *mass,
                                  int64_t rows, int64_t size, int32_t bf16, int32_t threads) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK, segments = (size + SEGMENT - 1) / SEGMENT;
    if (rows * size < PARALLEL_ELEMENTS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
        int limited = top_k[r] > 0 && top_k[r] < size;
        edges[r] = -INFINITY;
        if (!(limited || top_p[r] < 1 || min_p[r] > 0) || mass[r] != mass[r]) continue;
        size_t floats = (size_t)(blocks + size + 2 * VW), pairs = (size_t)(size + VW);
        float *area = work_area(floats * sizeof(float) + pairs * sizeof(Weighed));
        Row row = {.x = (const char *)x + r * stride * (bf16 ? 2 : 4), .best = best[r]};
        row.temperature = temperature && temperature[r] != 1 ? temperature[r] : 0;
        row.size = size, row.blocks = blocks, row.found = area;
        row.peaks = area + floats + 2 * pairs - (size_t)blocks;
        float *kept = sums + r * segments;
        if (bf16) {
            edges[r] = edge_of(&row, top_k[r], top_p[r], min_p[r], mass[r], 1);
            mass[r] = sum_kept(&row, edges[r], kept, 1);
        } else {
            edges[r] = edge_of(&row, top_k[r], top_p[r], min_p[r], mass[r], 0);
            mass[r] = sum_kept(&row, edges[r], kept, 0);
        }
    }
}
