#!/bin/sh
# make portable: mha.h on other CPUs, systems, compilers and flags, two targets at a time. What
# is not installed is skipped, and named. Other CPUs run under qemu-user, Windows under wine,
# WebAssembly under node, a microcontroller under qemu-system-arm. Cases are fewer. All suites run
# on aarch64, i386, tcc and Windows; those of $quick under the other qemus, with musl and on the
# x87, which is slow at NaN; those of $few with another compiler or flag. WebAssembly and bare
# metal, without threads and files, run tests/firmware.c.
#   sh tests/portable.sh            all
#   sh tests/portable.sh NAME...    those alone, e.g. s390x; names are below
cd "$(dirname "$0")/.." || exit 1
dir=build/portable
unset CFLAGS LDFLAGS
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"
export MHA_TEST_CASES=40

# The longest first. Native builds of the library with one flag or compiler share the objects
# of the tests, which "native" makes before all else.
names="aarch64 avx512 s390x armhf tcc ppc64le armel riscv64 i386 x87 mingw musl
    gcc-11 clang-13 clang-16 clang-19 clang-22
    Os Og O3 march-native no-avx lto unsigned-char fortify short-enums
    cortex-m4f cortex-m0 wasm wasm-simd msvc c2x c++20"

quick="kernels_suite errors_suite stages_suite golden_suite random_suite compact_suite"
few="errors_suite golden_suite random_suite"

ok() {
    times >"$out/times"
    echo "ok $name: $1 ($(($(date +%s) - begin)) s, $(sh tests/cpu.sh "$out/times") of a core)"
}
skip() { echo "skip $name ($1)"; }
fail() {
    grep -E '^FAIL|error:|undefined reference|^Pass:' "$log" | head -n 10
    tail -n 5 "$log"
    echo "FAIL $name; all output is in $log"
    : >$dir/failed
}

# has TOOL...: whether all are there.
has() {
    for tool; do
        command -v "$tool" >/dev/null || { skip "$tool is not installed"; return 1; }
    done
}

# links PACKAGE CC FLAGS...: whether a program can be built at all.
links() {
    package=$1
    shift
    printf '#include <math.h>\n#include <stdlib.h>\nint main(void) { return 0; }\n' >"$out/links.c"
    "$@" -o "$out/links" "$out/links.c" >"$log" 2>&1 || { skip "$package is not installed"; return 1; }
}

# suites PROGRAM "EMULATOR" SUITE...: each, or all; the sum of what passed goes to the log's end.
suites() {
    program=$1 emulator=$2
    shift 2
    : >"$out/runs"
    [ $# -gt 0 ] || set -- ""
    for suite; do
        $emulator "$program" -v ${suite:+-s "$suite"} $exclude >"$out/run" 2>&1
        status=$?
        tr -d '\r' <"$out/run" >>"$out/runs"
        tr -d '\r' <"$out/run" | tail -n 1 | grep -q '^Pass: [1-9][0-9]*, fail: 0,' && [ $status -eq 0 ] ||
            { cat "$out/runs" >>"$log"; echo "exit status $status${suite:+ in $suite}" >>"$log"; return 1; }
    done
    cat "$out/runs" >>"$log"
    sed -n 's/^Pass: \([0-9]*\), fail: 0, skip: \([0-9]*\)\.$/\1 \2/p' "$out/runs" |
        awk '{ p += $1; s += $2 } END { print "Pass: " p ", fail: 0, skip: " s "." }' >>"$log"
}

# full CC FLAGS EMULATOR [SUITE...]: the whole test program, built by CC.
full() {
    cc=$1 flags=$2 emulator=$3
    shift 3
    CC=$cc CFLAGS=$flags sh tests/build.sh "$out" >"$log" 2>&1 || { fail; return; }
    program=$out/test
    [ -e "$program" ] || program=$out/test.exe
    if suites "$program" "$emulator" "$@"; then ok "$(tail -n 1 "$log")"; else fail; fi
}

# relink CC FLAGS: the library alone built by CC with FLAGS, with the tests of the native build.
relink() {
    has $1 || return
    $1 $2 -Wall -Wextra -Werror -Itests/standin -c -o "$out/main.o" tests/main.c >"$log" 2>&1 &&
        $1 $2 -o "$out/test" "$out/main.o" $dir/native/support.o $dir/native/oracle.o \
            $dir/native/test_*.o -lm -pthread >>"$log" 2>&1 || { fail; return; }
    if suites "$out/test" "" $few; then ok "$(tail -n 1 "$log")"; else fail; fi
}

# one CC FLAGS EMULATOR: tests/firmware.c alone, as a program.
one() {
    $1 -std=c99 -Wall -Wextra -Werror $2 -o "$out/firmware" tests/firmware.c $4 -lm >"$log" 2>&1 &&
        $3 "$out/firmware" >>"$log" 2>&1 && tail -n 1 "$log" | grep -q '^Pass: firmware' &&
        { ok "a layer and a cache in static buffers"; return; }
    fail
}

# cross TRIPLET QEMU PACKAGE FLAGS [SUITE...]
cross() {
    triplet=$1 qemu=$2 package=$3 flags=$4
    shift 4
    has "$triplet-gcc" "$qemu" && links "$package" "$triplet-gcc" $flags &&
        full "$triplet-gcc" "$flags" "$qemu" "$@"
}

# m32 FLAGS [SUITE...]. gcc-multilib is at odds with the cross compilers, gcc-12-multilib is not; it
# lacks only the link to the headers of the kernel.
m32() {
    flags="-O1 -m32 -idirafter /usr/include/x86_64-linux-gnu $1"
    shift
    has gcc && links "gcc-N-multilib (N: gcc -dumpversion)" gcc $flags && full gcc "$flags" "" "$@"
}

# The firmware as it would be flashed: vectors at 0, code after them, data in RAM. Nothing of the
# C library but mathematics and memory may be in it.
metal() {
    has arm-none-eabi-gcc arm-none-eabi-nm qemu-system-arm &&
        links libnewlib-arm-none-eabi arm-none-eabi-gcc --specs=nosys.specs || return
    arm-none-eabi-gcc -std=c99 -Wall -Wextra -Werror -Os -mthumb $2 -nostartfiles \
        -Wl,--section-start=.vectors=0,-Ttext=0x400,-Tdata=0x20000000,--entry=0 \
        -o "$out/firmware" tests/firmware.c -lm >"$log" 2>&1 || { fail; return; }
    if arm-none-eabi-nm "$out/firmware" | grep -iE ' (_?malloc|_?free|_sbrk|.*printf|_write|__atomic.*)(_r)?$' >>"$log"; then
        echo "error: that is in it" >>"$log"
        fail
    elif timeout 60 qemu-system-arm -M "$1" -nographic -semihosting-config enable=on,target=native \
        -kernel "$out/firmware" </dev/null >>"$log" 2>&1 && grep -q '^Pass: firmware' "$log"; then
        set -- $(arm-none-eabi-size "$out/firmware" | tail -n 1)
        ok "a layer and a cache in static buffers, $1 bytes of code"
    else
        fail
    fi
}

# WebAssembly has no threads here: the firmware, as a program.
wasm() {
    has clang node || return
    links "wasi-libc, libclang-rt-14-dev-wasm32 or lld" clang --target=wasm32-wasi || return
    cat >"$out/run.mjs" <<'END'
import { WASI } from 'node:wasi';
import { readFileSync } from 'node:fs';
const wasi = new WASI({ version: 'preview1', returnOnExit: true });
const module = new WebAssembly.Module(readFileSync(process.argv[2]));
const program = new WebAssembly.Instance(module, { wasi_snapshot_preview1: wasi.wasiImport });
process.exit(wasi.start(program));
END
    one clang "--target=wasm32-wasi -O2 $1" \
        "node --no-warnings --experimental-wasi-unstable-preview1 $out/run.mjs"
}

# clang as it behaves for MSVC, with just enough of a C library to declare what is called.
msvc() {
    has clang || return
    echo 'double tanh(double), sqrt(double), exp(double), log(double), pow(double, double);
        double floor(double), ceil(double), sin(double), cos(double), fabs(double);' >"$out/math.h"
    echo '#include <stddef.h>
        void *memcpy(void *, const void *, size_t), *memset(void *, int, size_t);
        void *memmove(void *, const void *, size_t); int memcmp(const void *, const void *, size_t);
        ' >"$out/string.h"
    echo '#include <stddef.h>
        void *malloc(size_t); void free(void *);' >"$out/stdlib.h"
    : >"$log"
    for arch in x86_64 i686 aarch64; do
        clang --target=$arch-pc-windows-msvc -ffreestanding -Wall -Wextra -Wno-unused-function -Werror \
            -isystem "$out" -O1 -c -o "$out/$arch.o" -x c -DMHA_IMPLEMENTATION mha.h >>"$log" 2>&1 ||
            { fail; return; }
    done
    # What no Windows has: gcc's run-time library.
    if nm "$out/x86_64.o" "$out/i686.o" | grep -E ' U _*(cpu_model|cpu_indicator|atomic_)' >>"$log"; then
        echo "error: that is called" >>"$log"
        fail
    else
        ok "compiles for x86-64, x86 and arm64"
    fi
}

# standard STD C_OR_C++: every compiler that knows it, without a warning.
standard() {
    : >"$log"
    printf '#define MHA_IMPLEMENTATION\n#include "mha.h"\n' >"$out/implement.c"
    did=
    for cc in gcc gcc-11 clang clang-13 clang-16 clang-19 clang-22; do
        command -v $cc >/dev/null || continue
        echo '#include <stddef.h>' >"$out/probe.c"
        $cc -x $2 -std=$1 -fsyntax-only "$out/probe.c" >/dev/null 2>&1 || continue
        $cc -x $2 -std=$1 -I. -DMHA_THREADS -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Werror \
            "$out/implement.c" >>"$log" 2>&1 || { fail; return; }
        did="$did $cc"
    done
    if [ -n "$did" ]; then ok "$did"; else skip "no compiler here knows it"; fi
}

target() {
    name=$1 out=$dir/$1 log=$dir/$1/log begin=$(date +%s) exclude=
    mkdir -p "$out"
    case $name in
    aarch64) sh tests/emulate.sh neon || : >$dir/failed ;;
    avx512)
        if grep -qw avx512vl /proc/cpuinfo 2>/dev/null; then
            skip "this CPU has it: make test ran it; make emulate emulates it all the same"
        else
            sh tests/emulate.sh avx512 || : >$dir/failed
        fi
        ;;
    i386) m32 "-msse2 -mfpmath=sse" ;;
    x87)
        exclude="-x rows_alone"
        m32 "-mfpmath=387" $quick
        ;;
    musl) has musl-gcc && full musl-gcc "-O1 -static" "" $quick threads_suite ;;
    tcc) has tcc && full tcc "" "" ;;
    armhf)
        exclude="-x rows_alone"
        cross arm-linux-gnueabihf qemu-arm libc6-dev-armhf-cross "-O1 -static -mfpu=neon" $quick
        ;;
    armel) cross arm-linux-gnueabi qemu-arm libc6-dev-armel-cross "-O1 -static" $few ;;
    riscv64) cross riscv64-linux-gnu qemu-riscv64 libc6-dev-riscv64-cross "-O1 -static" $quick ;;
    s390x)
        exclude="-x rows_alone"
        cross s390x-linux-gnu qemu-s390x libc6-dev-s390x-cross "-O1 -static" $quick
        ;;
    ppc64le)
        cross powerpc64le-linux-gnu qemu-ppc64le libc6-dev-ppc64el-cross "-O1 -static" $quick
        ;;
    mingw)
        export WINEPREFIX="$PWD/$out/wine" WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml="
        has x86_64-w64-mingw32-gcc wine && full x86_64-w64-mingw32-gcc "-O1 -static" wine
        ;;
    gcc-* | clang-*) relink "$name" "-O2" ;;
    Os | Og | O3) relink gcc "-$name" ;;
    march-native) relink gcc "-O2 -march=native" ;;
    no-avx) relink gcc "-O2 -mno-avx" ;;
    lto) relink gcc "-O2 -flto" ;;
    unsigned-char) relink gcc "-O2 -funsigned-char" ;;
    fortify) relink gcc "-O2 -D_FORTIFY_SOURCE=3" ;;
    short-enums) one gcc "-O2 -fshort-enums" ;;
    cortex-m4f) metal mps2-an386 "-mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16" ;;
    cortex-m0) metal mps2-an385 "-mcpu=cortex-m0" ;;
    wasm) wasm "" ;;
    wasm-simd) wasm "-msimd128" ;;
    msvc) msvc ;;
    c2x) standard c2x c ;;
    c++20) standard c++20 c++ ;;
    *) echo "FAIL: there is no target $name"; : >$dir/failed ;;
    esac
}

if [ "$1" = --one ]; then
    target "$2"
    exit
fi
rm -rf $dir && mkdir -p $dir/native
[ $# -gt 0 ] && names=$*
CC=gcc CFLAGS=-O1 sh tests/build.sh $dir/native >$dir/native/log 2>&1 ||
    { tail -n 5 $dir/native/log; echo "FAIL native; all output is in $dir/native/log"; exit 1; }
echo $names | tr ' ' '\n' | xargs -P "${JOBS:-2}" -n 1 sh tests/portable.sh --one
[ ! -e $dir/failed ]
