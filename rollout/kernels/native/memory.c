/* Large pages, where the system gives them on request. */
#include "vec.h"

#if defined(__linux__)
#include <sys/mman.h>

#define HUGE_PAGE ((uintptr_t)2 << 20)

/* The whole large pages inside [start, start + size); a refusal changes nothing. */
EXPORT void rollout_use_huge_pages(void *start, int64_t size) {
    uintptr_t first = ((uintptr_t)start + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uintptr_t last = ((uintptr_t)start + (uintptr_t)size) & ~(HUGE_PAGE - 1);
    if (last > first) madvise((void *)first, last - first, 14 /* MADV_HUGEPAGE */);
}
#else
EXPORT void rollout_use_huge_pages(void *start, int64_t size) { (void)start, (void)size; }
#endif
