#!/bin/sh
# Is mha.h a good guest in someone's program? Each check is one test, in a folder of its own
# that holds mha.h and nothing else; the last looks at the project itself.
cd "$(dirname "$0")/.." || exit 1
top=$PWD dir=$PWD/build/hygiene pass=0 fail=0 skip=0
rm -rf "$dir" && mkdir -p "$dir"
: "${CC:=cc}" "${CXX:=c++}"

W="-Werror -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wcast-align -Wcast-qual
    -Wundef -Wdouble-promotion"
C="$CC -std=c99 $W -Wstrict-prototypes -Wmissing-prototypes"
CPP="$CXX -std=c++11 $W"

# check NAME COMMAND...: one test. Exit status 77 is "skipped, for the reason I printed last".
check() {
    name=$1
    shift
    rm -rf "$dir/here" && mkdir "$dir/here" && cp mha.h "$dir/here"
    (cd "$dir/here" && "$@") >"$dir/log" 2>&1
    case $? in
    0) pass=$((pass + 1)) && echo "ok $name" ;;
    77) skip=$((skip + 1)) && echo "skip $name ($(tail -n 1 "$dir/log"))" ;;
    *) fail=$((fail + 1)) && sed 's/^/  /' "$dir/log" && echo "FAIL $name" ;;
    esac
}
skip() { echo "$*"; exit 77; }
need_cxx() { command -v "${CXX%% *}" >/dev/null || skip "no C++ compiler: $CXX"; }
need_nm() { command -v nm >/dev/null || skip "no nm"; }

# ---- sources ---------------------------------------------------------------------------------

# A user of the library, C99 and C++11: a layer of zeros gives its output bias. MAIN names main.
user() {
    cat <<'END'
#include "mha.h"
#ifndef MAIN
#define MAIN main
#endif
int MAIN(void);
int MAIN(void)
{
    static float buffer[1 << 14], work[1 << 18], zero[64], x[8], y[8];
    float bias[4] = { 1, 2, 3, 4 };
    mha_config c;
    mha_weights w;
    mha_args a;
    mha_layer *layer;
    static const mha_config c0 = { 0 };
    static const mha_weights w0 = { 0 };
    static const mha_args a0 = { 0 };
    int i;
    c = c0, w = w0, a = a0;
    c.d_model = 4, c.n_heads = 2;
    w.qkv = zero, w.out = zero, w.b_out = bias;
    a.batch = 1, a.seq = 2, a.x = x, a.y = y, a.workspace = work, a.workspace_size = sizeof work;
    if (mha_layer_init(&layer, buffer, sizeof buffer, &c, &w) != MHA_OK) return 1;
    if (mha_forward(layer, &a) != MHA_OK) return 2;
    for (i = 0; i < 8; i++)
        if (!(y[i] >= bias[i % 4] && y[i] <= bias[i % 4])) return 3;
    return 0;
}
END
}
implement() { echo '#define MHA_IMPLEMENTATION'; echo '#include "mha.h"'; }
plain() { echo '#include "mha.h"'; }
NOINIT="-Wno-missing-field-initializers" # { 0 } is complete enough

# object OUT FLAGS...: the implementation, alone.
object() {
    out=$1
    shift
    implement >object.c
    $C -c -o "$out" "$@" object.c
}

# symbols OBJECT TYPES: names of the symbols whose nm type is one of TYPES.
symbols() {
    us=
    [ "$(uname)" = Darwin ] && us=_
    nm -P "$1" | awk -v t="[$2]" '$2 ~ "^" t "$" { print $1 }' | sed "s/^$us//" | sort -u
}
# none WORDS...: true if there are none; else says them.
none() { [ -z "$*" ] || { echo "not expected: $*"; false; }; }

# ---- including it ------------------------------------------------------------------------------

declarations_only() { plain >a.c && $C -O2 -c a.c; }
# <windows.h> makes these macros.
words_of_windows() { object a.o -O1 -DMHA_THREADS -Dfar= -Dnear= -Dsmall=char -Dinterface=struct; }
twice() { { plain; plain; implement; user; } >a.c && $C $NOINIT -O2 -o a a.c -lm && ./a; }
implementation_twice() { { implement; implement; user; } >a.c && $C $NOINIT -o a a.c -lm && ./a; }
two_files() {
    implement >a.c && user >b.c && $C -c a.c && $C $NOINIT -c b.c && $C -o a a.o b.o -lm && ./a
}
static_two_files() {
    { echo '#define MHA_STATIC'; implement; user; } >a.c && cp a.c b.c &&
        echo 'int other(void); int main(void) { return first() + other(); }' >>b.c &&
        $C $NOINIT -DMAIN=other -c a.c && $C $NOINIT -DMAIN=first -c b.c &&
        $C -o a a.o b.o -lm && ./a
}
static_unused() { { echo '#define MHA_STATIC'; implement; } >a.c && $C -O2 -c a.c; }
static_exports_nothing() {
    need_nm
    object a.o -DMHA_STATIC && none $(symbols a.o TDBRCV)
}
working_program() {
    awk '/^   [A-Z]/ { on = 0 } on { sub(/^       /, ""); print } /^   A WORKING PROGRAM/ { on = 1 }' \
        mha.h >main.c && grep -q 'int main' main.c && $CC -O2 main.c -lm && ./a.out
}
as_cpp() { need_cxx; { implement; user; } >a.cpp && $CPP $NOINIT -O2 -o a a.cpp -lm && ./a; }
c_used_by_cpp() {
    need_cxx
    implement >a.c && user >b.cpp && $C -c a.c && $CPP $NOINIT -c b.cpp &&
        $CXX -o a a.o b.o -lm && ./a
}
static_as_cpp() {
    need_cxx
    { echo '#define MHA_STATIC'; implement; user; } >a.cpp && $CPP $NOINIT -o a a.cpp -lm && ./a
}

# ---- options -------------------------------------------------------------------------------------

heap="malloc|calloc|realloc|free|aligned_alloc|posix_memalign|memalign|mmap"
no_heap() { none $(symbols "$1" Uw | grep -E "^($heap)$"); }
no_malloc() {
    { implement; user; } >a.c && $C $NOINIT -DMHA_NO_MALLOC -o a a.c -lm && ./a || return 1
    need_nm
    object a.o -DMHA_NO_MALLOC && no_heap a.o
}
own_malloc() {
    printf '%s\n' '#include <stddef.h>' 'void *my_get(size_t n);' 'void my_put(void *p);' \
        '#define MHA_MALLOC(n) my_get(n)' '#define MHA_FREE(p) my_put(p)' >a.c
    implement >>a.c
    $C -O2 -c a.c || return 1
    need_nm
    no_heap a.o && symbols a.o Uw | grep -q my_get && symbols a.o Uw | grep -q my_put
}
half_malloc() {
    for m in 'MHA_MALLOC(n)=0' 'MHA_FREE(p)=(void)0'; do
        object a.o "-D$m" 2>err && echo "-D$m alone compiles" && return 1
        cat err
        grep error err | grep MHA_MALLOC | grep -q MHA_FREE || return 1
    done
}
no_simd() { { implement; user; } >a.c && $C $NOINIT -O2 -DMHA_NO_SIMD -o a a.c -lm && ./a; }
threads() {
    { echo '#define MHA_THREADS'; implement; user; } >a.c &&
        $C $NOINIT -O2 -o a a.c -lm -pthread && ./a
}
flags() { { implement; user; } >a.c && $C $NOINIT "$@" -o a a.c -lm && ./a; }

# ---- names -----------------------------------------------------------------------------------------

exports() {
    need_nm
    object a.o -DMHA_THREADS -O2 && none $(symbols a.o TDBRCVW | grep -v '^mha_[a-z0-9]')
}
internals() {
    need_nm
    object a.o -DMHA_THREADS -O0 && none $(symbols a.o tdbr | grep -v '^mha__' | grep -v '\.')
}
# Everything that is declared is defined, and nothing else is exported.
declared_is_defined() {
    need_nm
    object a.o -DMHA_THREADS && symbols a.o T >defined &&
        sed -n 's/^MHA_API .*[ *]\(mha_[a-z0-9_]*\)(.*/\1/p' mha.h | sort -u >declared &&
        diff declared defined
}
imports() {
    need_nm
    libc="mem(cpy|move|set|cmp|chr)|str(len|n?cpy|n?cmp)|v?snprintf|malloc|calloc|free"
    libm="(exp|exp2|log|log2|sqrt|pow|fma|ldexp|scalbn|floor|rint|nearbyint|fabs|fmax|fmin|cos|sin|sincos|tanh|ceil)f?"
    toolchain="_GLOBAL_OFFSET_TABLE_|__cpu_model|__cpu_indicator_init|__stack_chk_fail|__[a-z]*_chk"
    object a.o && none $(symbols a.o Uw | grep -vE "^($libc|$libm|$toolchain)$") &&
        object b.o -DMHA_THREADS -O2 &&
        none $(symbols b.o Uw | grep -vE "^($libc|$libm|$toolchain|pthread_[a-z_]*|sysconf)$")
}
# Position-independent code would show constant tables of pointers as data.
no_globals() {
    need_nm
    object a.o -fno-pic -fno-pie -O2 && none $(symbols a.o dDbBC)
}
macros() {
    none $(sed -n 's/^ *# *define *\([A-Za-z0-9_]*\).*/\1/p' mha.h | grep -vE '^(MHA_|WIN32_LEAN_AND_MEAN$)')
}
types() {
    none $(sed -nE -e 's/^} *([A-Za-z0-9_]+);.*/\1/p' \
        -e 's/^(typedef )?(struct|enum|union) ([A-Za-z0-9_]+).*/\3/p' mha.h | grep -v '^mha_')
}
includes() {
    libc="stddef|stdint|stdlib|string|stdarg|stdio|limits|float|math"
    system="[a-z0-9]*intrin|arm_neon|cpuid|pthread|unistd|windows|process"
    none $(sed -n 's/^ *# *include *\([<"].*[>"]\).*/\1/p' mha.h |
        grep -vE "^(<($libc|$system)\.h>|\"mha\.h\")$")
}

# ---- the project -------------------------------------------------------------------------------------

top_level() {
    files=$(cd "$top" && git ls-files 2>/dev/null) && [ -n "$files" ] || skip "not a git checkout"
    none $(echo "$files" | sed 's,/.*,/,' | sort -u |
        grep -vE '^(\.|(mha\.h|examples/|tests/|Makefile|README\.md|LICENSE)$)')
}

check "declarations alone, nothing included before" declarations_only
check "compiles after <windows.h>, which has macros of its own" words_of_windows
check "included twice, then the implementation, in one file" twice
check "implementation included twice in one file" implementation_twice
check "implementation in one file, use in another" two_files
check "MHA_STATIC in two files of one program" static_two_files
check "MHA_STATIC with nothing used" static_unused
check "MHA_STATIC exports nothing" static_exports_nothing
check "the manual's own program, cc -O2 main.c -lm" working_program
check "as C++" as_cpp
check "as C++ with MHA_STATIC" static_as_cpp
check "implementation in C, use in C++" c_used_by_cpp
check "MHA_NO_MALLOC: no heap" no_malloc
check "MHA_MALLOC and MHA_FREE: no other heap" own_malloc
check "one of MHA_MALLOC, MHA_FREE alone is an error that names both" half_malloc
check "MHA_NO_SIMD" no_simd
check "MHA_THREADS" threads
check "-O0" flags -O0
check "-Os" flags -Os
check "-O3 -ffast-math" flags -O3 -ffast-math
check "exported names are mha_*, internal ones are not exported" exports
check "internal names are mha__*" internals
check "what is declared is defined" declared_is_defined
check "needs libc and libm only; does not print, abort or exit" imports
check "no writable globals" no_globals
check "macros are MHA_*" macros
check "types are mha_*" types
check "includes libc, libm, intrinsics and threads only" includes
check "the top level of the project has its six entries, and hidden ones" top_level

echo "Pass: $pass, fail: $fail, skip: $skip."
[ $fail -eq 0 ]
