/* The instruction set this library was compiled for. */
#include "vec.h"

/* An index into INSTRUCTIONS of __init__.py. */
EXPORT int32_t rollout_instructions(void) {
#if defined(__AVX512BF16__)
    return 3;
#elif defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#elif defined(__aarch64__)
    return 4;
#else
    return 0;
#endif
}
