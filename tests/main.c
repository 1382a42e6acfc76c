/* main.c - the test program: the library itself, and every suite.
   Environment: MHA_TEST_SEED, MHA_TEST_CASES (randomised cases), MHA_TEST_CASE (one of them
   alone), MHA_TEST_ISA (one table of kernels alone: "neon"), MHA_TEST_GOLDEN (folder of the
   golden files). */
#define MHA_IMPLEMENTATION
#ifndef _WIN32
#include <pthread.h>
#define pthread_create test_pthread_create
#endif
#include "test.h"

SUITE_EXTERN(kernels_suite);
SUITE_EXTERN(errors_suite);
SUITE_EXTERN(cache_suite);
SUITE_EXTERN(compact_suite);
SUITE_EXTERN(edges_suite);
SUITE_EXTERN(stages_suite);
SUITE_EXTERN(golden_suite);
SUITE_EXTERN(props_suite);
SUITE_EXTERN(shape_suite);
SUITE_EXTERN(random_suite);
SUITE_EXTERN(memory_suite);
SUITE_EXTERN(threads_suite);

GREATEST_MAIN_DEFS();

int main(int argc, char **argv)
{
    const char *seed = getenv("MHA_TEST_SEED"), *cases = getenv("MHA_TEST_CASES");
    mha_isa isa[8];
    int i, n;

    if (seed && *seed) test_seed = (uint64_t)strtoull(seed, NULL, 0);
    if (cases && *cases) test_cases = strtol(cases, NULL, 0);

    GREATEST_MAIN_BEGIN();
    printf("mha.h %s: seed %llu, %ld randomised cases, on", MHA_VERSION,
           (unsigned long long)test_seed, test_cases);
    n = test_isas(isa);
    for (i = 0; i < n; i++) printf(" %s", mha_isa_name(isa[i]));
    printf("\n");

    RUN_SUITE(kernels_suite);
    RUN_SUITE(errors_suite);
    RUN_SUITE(edges_suite);
    RUN_SUITE(stages_suite);
    RUN_SUITE(golden_suite);
    RUN_SUITE(props_suite);
    RUN_SUITE(shape_suite);
    RUN_SUITE(random_suite);
    RUN_SUITE(cache_suite);
    RUN_SUITE(compact_suite);
    RUN_SUITE(memory_suite);
    RUN_SUITE(threads_suite);
    GREATEST_MAIN_END();
}
