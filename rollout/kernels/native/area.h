/* Memory that a thread keeps from one call to the next: fresh pages would cost more than the
 * arithmetic. One area of each name per source file; it only grows, and asking again gives the
 * same one. */
#ifndef ROLLOUT_AREA_H
#define ROLLOUT_AREA_H

#include <stdlib.h>

#define WORK_AREA(name)                               \
    static void *name(size_t bytes) {                 \
        static __thread void *kept;                   \
        static __thread size_t size;                  \
        if (size < bytes) {                           \
            free(kept);                               \
            size = (bytes + 4095) / 4096 * 4096;      \
            kept = aligned_alloc(64, size);           \
            if (!kept) abort();                       \
        }                                             \
        return kept;                                  \
    }

WORK_AREA(work_area)

#endif
