#!/bin/sh
# make emulate: the whole test program on the kernels this CPU does not have, side by side: NEON
# under qemu-user, and AVX-512 in plain C by SIMDe (tests/simde/immintrin.h). Only the
# randomised cases are fewer. What is not installed is skipped, and named.
#   sh tests/emulate.sh neon     that one alone
cd "$(dirname "$0")/.." || exit 1
dir=build/emulate
for name in ${1:-neon avx512}; do rm -rf $dir/$name && mkdir -p $dir/$name; done
unset CFLAGS LDFLAGS
[ -n "$SEED" ] && export MHA_TEST_SEED="$SEED"

# try NAME CASES COMPILER FLAGS [EMULATOR]: the tests on table NAME alone.
try() {
    name=$1 out=$dir/$1 log=$dir/$1/log begin=$(date +%s)
    CC=$3 CFLAGS=$4 sh tests/build.sh "$out" >"$log" 2>&1 && plain "$name" >>"$log" 2>&1 &&
        MHA_TEST_ISA=$name MHA_TEST_CASES=$2 $5 "$out/test" -v >>"$log" 2>&1 &&
        grep -q "randomised cases, on $name\$" "$log" && tail -n 1 "$log" | grep -q '^Pass: [1-9]' &&
        { ok; return; }
    grep -E '^FAIL|error:|^Pass:' "$log" | head -n 20
    tail -n 5 "$log"
    echo "FAIL $name; all output is in $log"
    : >$dir/$name/failed
}

ok() {
    times >"$out/times"
    echo "ok $name: $(tail -n 1 "$log") ($(($(date +%s) - begin)) s, $(sh tests/cpu.sh "$out/times") of a core)"
}

# The emulation of AVX-512 is one only if no AVX is in it.
plain() {
    [ "$1" = avx512 ] || return 0
    ! objdump -d $dir/avx512/*.o | grep '%[yz]mm' || { echo "error: AVX in the emulation"; return 1; }
}

# has NAME TOOL...: whether all are there.
has() {
    name=$1
    shift
    for tool; do
        command -v "$tool" >/dev/null || { echo "skip $name ($tool is not installed)"; return 1; }
    done
}

# In GNU mode, as a plain cc compiles: a * b + c may become one operation.
neon() {
    has neon aarch64-linux-gnu-gcc qemu-aarch64 || return
    echo '#include <math.h>' >$dir/neon/libc.c
    aarch64-linux-gnu-gcc -E $dir/neon/libc.c >/dev/null 2>&1 ||
        { echo "skip neon (libc6-dev-arm64-cross is not installed)"; return; }
    try neon 100 aarch64-linux-gnu-gcc "-O2 -std=gnu11 -static" qemu-aarch64
}

avx512() {
    [ "$(uname -m)" = x86_64 ] || { echo "skip avx512 (this machine is $(uname -m))"; return; }
    has avx512 gcc objdump || return
    echo '#include <simde/x86/avx512.h>' >$dir/avx512/simde.c
    gcc -E $dir/avx512/simde.c >/dev/null 2>&1 ||
        { echo "skip avx512 (SIMDe, libsimde-dev, is not installed)"; return; }
    try avx512 400 gcc "-O2 -Wno-psabi -isystem tests/simde"
}

for name in ${1:-neon avx512}; do $name & done
wait
for name in ${1:-neon avx512}; do [ ! -e $dir/$name/failed ] || exit 1; done
