/* greatest.h - a small stand-in for the test library greatest, used when greatest is not there.

   It has the part of greatest 1.5's interface that the tests of mha.h use, so the same tests
   compile with either; https://github.com/silentbicycle/greatest is the real thing, and
   `make greatest` fetches it. No code of greatest is here. */
#ifndef GREATEST_H
#define GREATEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef GREATEST_STDOUT
#define GREATEST_STDOUT stdout
#endif

typedef enum greatest_test_res {
    GREATEST_TEST_RES_PASS = 0,
    GREATEST_TEST_RES_FAIL = -1,
    GREATEST_TEST_RES_SKIP = 1
} greatest_test_res;

typedef void greatest_suite_cb(void);
typedef void greatest_setup_cb(void *udata);
typedef void greatest_teardown_cb(void *udata);
typedef const char *greatest_enum_str_fun(int value);

typedef struct greatest_count {
    unsigned passed, failed, skipped;
    clock_t begin;
} greatest_count;

/* All state of a run; one object, defined by GREATEST_MAIN_DEFS. */
typedef struct greatest_run_info {
    int verbose, list_only, exact, first_fail, abort_on_fail; /* -v -l -e -f -a */
    const char *suite_filter, *test_filter, *test_exclude;    /* -s -t -x */
    unsigned assertions, col, fail_line;
    const char *fail_file, *msg, *suffix;
    char name[128];
    greatest_count total, suite;
    clock_t test_begin;
    greatest_setup_cb *setup;
    greatest_teardown_cb *teardown;
    void *setup_udata, *teardown_udata;
} greatest_run_info;

extern greatest_run_info greatest_info;

static inline double greatest_seconds(clock_t since)
{
    return (double)(clock() - since) / (double)CLOCKS_PER_SEC;
}

/* The next test is called name_suffix. */
static inline void greatest_set_test_suffix(const char *suffix)
{
    greatest_info.suffix = suffix;
}

static inline void GREATEST_SET_SETUP_CB(greatest_setup_cb *cb, void *udata)
{
    greatest_info.setup = cb;
    greatest_info.setup_udata = udata;
}

static inline void GREATEST_SET_TEARDOWN_CB(greatest_teardown_cb *cb, void *udata)
{
    greatest_info.teardown = cb;
    greatest_info.teardown_udata = udata;
}

static inline int greatest_name_match(const char *name, const char *filter)
{
    return greatest_info.exact ? strcmp(name, filter) == 0 : strstr(name, filter) != NULL;
}

static inline int greatest_stopped(void)
{
    return greatest_info.first_fail && greatest_info.total.failed > 0;
}

static inline int greatest_all_passed(void)
{
    return greatest_info.total.failed == 0;
}

/* 1 if the test is to be run now. */
static inline int greatest_test_pre(const char *test)
{
    greatest_run_info *g = &greatest_info;
    const char *suffix = g->suffix;
    g->suffix = NULL;
    snprintf(g->name, sizeof g->name, "%s%s%s", test, suffix ? "_" : "", suffix ? suffix : "");
    if (g->test_filter && !greatest_name_match(g->name, g->test_filter)) return 0;
    if (g->test_exclude && greatest_name_match(g->name, g->test_exclude)) return 0;
    if (greatest_stopped()) return 0;
    if (g->list_only) {
        fprintf(GREATEST_STDOUT, "  %s\n", g->name);
        return 0;
    }
    g->msg = NULL;
    if (g->setup) g->setup(g->setup_udata);
    g->test_begin = clock();
    return 1;
}

static inline void greatest_test_post(greatest_test_res res)
{
    greatest_run_info *g = &greatest_info;
    double seconds = greatest_seconds(g->test_begin);
    const char *word = res == GREATEST_TEST_RES_PASS   ? "PASS"
                       : res == GREATEST_TEST_RES_SKIP ? "SKIP"
                                                       : "FAIL";
    if (g->teardown) g->teardown(g->teardown_udata);
    g->suite.passed += res == GREATEST_TEST_RES_PASS;
    g->suite.skipped += res == GREATEST_TEST_RES_SKIP;
    g->suite.failed += res == GREATEST_TEST_RES_FAIL;
    g->total.passed += res == GREATEST_TEST_RES_PASS;
    g->total.skipped += res == GREATEST_TEST_RES_SKIP;
    g->total.failed += res == GREATEST_TEST_RES_FAIL;
    if (g->verbose || res == GREATEST_TEST_RES_FAIL) {
        fprintf(GREATEST_STDOUT, "%s%s %s: %s", g->verbose ? "" : "\n", word, g->name,
                g->msg ? g->msg : "");
        if (res == GREATEST_TEST_RES_FAIL)
            fprintf(GREATEST_STDOUT, " (%s:%u)", g->fail_file, g->fail_line);
        fprintf(GREATEST_STDOUT, " (%.3f sec)\n", seconds);
        g->col = 0;
    } else {
        fprintf(GREATEST_STDOUT, "%s%s", res == GREATEST_TEST_RES_PASS ? "." : "s",
                ++g->col % 72 == 0 ? "\n" : "");
    }
    fflush(GREATEST_STDOUT); /* so that a crash in the next test does not lose this line */
    if (res == GREATEST_TEST_RES_FAIL && g->abort_on_fail) abort();
}

static inline void greatest_run_suite(greatest_suite_cb *suite, const char *name)
{
    static const greatest_count zero;
    greatest_count *c = &greatest_info.suite;
    if (greatest_info.suite_filter && !greatest_name_match(name, greatest_info.suite_filter))
        return;
    if (greatest_stopped()) return;
    fprintf(GREATEST_STDOUT, "\n* Suite %s:\n", name);
    *c = zero;
    c->begin = clock();
    greatest_info.col = 0;
    suite();
    GREATEST_SET_SETUP_CB(NULL, NULL);
    GREATEST_SET_TEARDOWN_CB(NULL, NULL);
    if (greatest_info.list_only) return;
    fprintf(GREATEST_STDOUT, "\n%u tests - %u passed, %u failed, %u skipped (%.3f sec)\n",
            c->passed + c->failed + c->skipped, c->passed, c->failed, c->skipped,
            greatest_seconds(c->begin));
}

static inline void greatest_usage(const char *program, int status)
{
    fprintf(GREATEST_STDOUT,
            "Usage: %s [-hlfave] [-s SUITE] [-t TEST] [-x EXCLUDE]\n"
            "  -h, --help  print this help\n"
            "  -l          list suites and tests, then exit\n"
            "  -f          stop at the first failure\n"
            "  -a          abort at the first failure\n"
            "  -v          verbose: a line for each test\n"
            "  -s SUITE    only run suites whose name contains SUITE\n"
            "  -t TEST     only run tests whose name contains TEST\n"
            "  -x EXCLUDE  leave out tests whose name contains EXCLUDE\n"
            "  -e          with -s, -t, -x: the whole name must match\n",
            program);
    exit(status);
}

static inline void greatest_parse_options(int argc, char **argv)
{
    greatest_run_info *g = &greatest_info;
    g->total.begin = clock();
    for (int i = 1; i < argc; i++) {
        const char *o = argv[i];
        if (strcmp(o, "--") == 0) return;
        if (strcmp(o, "-h") == 0 || strcmp(o, "--help") == 0) greatest_usage(argv[0], EXIT_SUCCESS);
        if (o[0] != '-' || o[1] == '\0' || o[2] != '\0') greatest_usage(argv[0], EXIT_FAILURE);
        if (strchr("stx", o[1]) && i + 1 == argc) greatest_usage(argv[0], EXIT_FAILURE);
        switch (o[1]) {
        case 'l': g->list_only = 1; break;
        case 'f': g->first_fail = 1; break;
        case 'a': g->abort_on_fail = 1; break;
        case 'v': g->verbose = 1; break;
        case 'e': g->exact = 1; break;
        case 's': g->suite_filter = argv[++i]; break;
        case 't': g->test_filter = argv[++i]; break;
        case 'x': g->test_exclude = argv[++i]; break;
        default: greatest_usage(argv[0], EXIT_FAILURE);
        }
    }
}

static inline void GREATEST_PRINT_REPORT(void)
{
    const greatest_count *c = &greatest_info.total;
    if (greatest_info.list_only) return;
    fprintf(GREATEST_STDOUT, "\nTotal: %u tests (%.0f ms, %u assertions)\n",
            c->passed + c->failed + c->skipped, greatest_seconds(c->begin) * 1e3,
            greatest_info.assertions);
    fprintf(GREATEST_STDOUT, "Pass: %u, fail: %u, skip: %u.\n", c->passed, c->failed, c->skipped);
}

/* ---- for main.c ---------------------------------------------------------------------- */

#define GREATEST_MAIN_DEFS() greatest_run_info greatest_info
#define GREATEST_MAIN_BEGIN() greatest_parse_options(argc, argv)
#define GREATEST_MAIN_END() \
    do { \
        GREATEST_PRINT_REPORT(); \
        return greatest_all_passed() ? EXIT_SUCCESS : EXIT_FAILURE; \
    } while (0)

/* ---- suites and tests ------------------------------------------------------------------ */

#define TEST static enum greatest_test_res
#define SUITE(NAME) \
    void NAME(void); \
    void NAME(void)
#define SUITE_EXTERN(NAME) void NAME(void)
#define RUN_SUITE(NAME) greatest_run_suite(NAME, #NAME)
#define RUN_TESTp(NAME, ...) \
    do { \
        if (greatest_test_pre(#NAME)) greatest_test_post(NAME(__VA_ARGS__)); \
    } while (0)
#define RUN_TEST(NAME) \
    do { \
        if (greatest_test_pre(#NAME)) greatest_test_post(NAME()); \
    } while (0)
#define RUN_TEST1(NAME, ENV) RUN_TESTp(NAME, ENV)
#define IGNORE_TEST(NAME) (void)NAME
#define SET_SETUP(CB, UDATA) GREATEST_SET_SETUP_CB(CB, UDATA)
#define SET_TEARDOWN(CB, UDATA) GREATEST_SET_TEARDOWN_CB(CB, UDATA)
#define GREATEST_IS_VERBOSE() (greatest_info.verbose > 0)

/* ---- results: these return from the test -------------------------------------------------- */

#define GREATEST_RETURN(RES, MSG) \
    do { \
        greatest_info.msg = (MSG); \
        greatest_info.fail_file = __FILE__; \
        greatest_info.fail_line = __LINE__; \
        return (RES); \
    } while (0)
#define PASSm(MSG) GREATEST_RETURN(GREATEST_TEST_RES_PASS, MSG)
#define FAILm(MSG) GREATEST_RETURN(GREATEST_TEST_RES_FAIL, MSG)
#define SKIPm(MSG) GREATEST_RETURN(GREATEST_TEST_RES_SKIP, MSG)
#define PASS() PASSm(NULL)
#define FAIL() FAILm(NULL)
#define SKIP() SKIPm(NULL)

/* Runs a helper that itself uses ASSERT; leaves this test too if the helper did not pass. */
#define CHECK_CALL(CALL) \
    do { \
        enum greatest_test_res greatest_res_ = (CALL); \
        if (greatest_res_ != GREATEST_TEST_RES_PASS) return greatest_res_; \
    } while (0)

/* ---- assertions ---------------------------------------------------------------------------- */

#define ASSERTm(MSG, COND) \
    do { \
        greatest_info.assertions++; \
        if (!(COND)) FAILm(MSG); \
    } while (0)
#define ASSERT_FALSEm(MSG, COND) ASSERTm(MSG, !(COND))
#define ASSERT_EQm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) == (GOT))
#define ASSERT_NEQm(MSG, EXP, GOT) ASSERTm(MSG, (EXP) != (GOT))
#define ASSERT_GTm(MSG, A, B) ASSERTm(MSG, (A) > (B))
#define ASSERT_GTEm(MSG, A, B) ASSERTm(MSG, (A) >= (B))
#define ASSERT_LTm(MSG, A, B) ASSERTm(MSG, (A) < (B))
#define ASSERT_LTEm(MSG, A, B) ASSERTm(MSG, (A) <= (B))

/* The same, showing what was expected and what came: SHOW is printf's FMT and one argument. */
#define GREATEST_ASSERT_SHOW(MSG, COND, FMT, EXP, GOT) \
    do { \
        greatest_info.assertions++; \
        if (!(COND)) { \
            fprintf(GREATEST_STDOUT, "\nExpected: "); \
            fprintf(GREATEST_STDOUT, FMT, EXP); \
            fprintf(GREATEST_STDOUT, "\n     Got: "); \
            fprintf(GREATEST_STDOUT, FMT, GOT); \
            fprintf(GREATEST_STDOUT, "\n"); \
            FAILm(MSG); \
        } \
    } while (0)
#define ASSERT_EQ_FMTm(MSG, EXP, GOT, FMT) GREATEST_ASSERT_SHOW(MSG, (EXP) == (GOT), FMT, EXP, GOT)
#define ASSERT_STR_EQm(MSG, EXP, GOT) \
    GREATEST_ASSERT_SHOW(MSG, strcmp((EXP), (GOT)) == 0, "%s", EXP, GOT)
#define ASSERT_STRN_EQm(MSG, EXP, GOT, N) \
    GREATEST_ASSERT_SHOW(MSG, strncmp((EXP), (GOT), (N)) == 0, "%s", EXP, GOT)
#define ASSERT_ENUM_EQm(MSG, EXP, GOT, STR) \
    GREATEST_ASSERT_SHOW(MSG, (int)(EXP) == (int)(GOT), "%s", STR(EXP), STR(GOT))
#define ASSERT_MEM_EQm(MSG, EXP, GOT, SIZE) ASSERTm(MSG, memcmp((EXP), (GOT), (SIZE)) == 0)
/* Unlike greatest's, fails on NaN. */
#define ASSERT_IN_RANGEm(MSG, EXP, GOT, TOL) \
    GREATEST_ASSERT_SHOW(MSG, \
                         (double)(EXP) - (double)(GOT) <= (double)(TOL) && \
                             (double)(GOT) - (double)(EXP) <= (double)(TOL), \
                         "%g", (double)(EXP), (double)(GOT))

#define ASSERT(COND) ASSERTm(#COND, COND)
#define ASSERT_FALSE(COND) ASSERT_FALSEm(#COND, COND)
#define ASSERT_EQ(EXP, GOT) ASSERT_EQm(#EXP " != " #GOT, EXP, GOT)
#define ASSERT_NEQ(EXP, GOT) ASSERT_NEQm(#EXP " == " #GOT, EXP, GOT)
#define ASSERT_GT(A, B) ASSERT_GTm(#A " <= " #B, A, B)
#define ASSERT_GTE(A, B) ASSERT_GTEm(#A " < " #B, A, B)
#define ASSERT_LT(A, B) ASSERT_LTm(#A " >= " #B, A, B)
#define ASSERT_LTE(A, B) ASSERT_LTEm(#A " > " #B, A, B)
#define ASSERT_EQ_FMT(EXP, GOT, FMT) ASSERT_EQ_FMTm(#EXP " != " #GOT, EXP, GOT, FMT)
#define ASSERT_STR_EQ(EXP, GOT) ASSERT_STR_EQm(#EXP " != " #GOT, EXP, GOT)
#define ASSERT_STRN_EQ(EXP, GOT, N) ASSERT_STRN_EQm(#EXP " != " #GOT, EXP, GOT, N)
#define ASSERT_MEM_EQ(EXP, GOT, SIZE) ASSERT_MEM_EQm(#EXP " != " #GOT, EXP, GOT, SIZE)
#define ASSERT_ENUM_EQ(EXP, GOT, STR) ASSERT_ENUM_EQm(#EXP " != " #GOT, EXP, GOT, STR)
#define ASSERT_IN_RANGE(EXP, GOT, TOL) \
    ASSERT_IN_RANGEm(#EXP " != " #GOT " +/- " #TOL, EXP, GOT, TOL)

#endif /* GREATEST_H */
