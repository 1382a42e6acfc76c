#!/bin/sh
# make asm: what the compilers make of the hot loops under plain -O2. Each kernel must have fused
# multiply-adds and no call; no inner loop with multiply-adds may store to the stack, which is
# what a spilled accumulator does; and the longest inner loop must be that of the whole tile: its
# number of multiply-adds is a multiple of the tile's. Reads of the stack are counted only: they
# are constants and, with clang, a stride, loaded from there as from anywhere else.
# More flags for the compilers, to see it fail: sh tests/asm.sh -O0
cd "$(dirname "$0")/.." || exit 1
dir=build/asm status=0
rm -rf $dir && mkdir -p $dir
printf '#define MHA_IMPLEMENTATION\n#include "mha.h"\n' >$dir/mha.c

# kernel NAME TILE [CALLS]: looks at a kernel in $obj, as $objdump shows it: mha__NAME, with the
# parts gcc makes of it; these may call each other. CALLS is how many other calls it may have
# outside of its inner loops.
kernel() {
    for f in $($nm "$obj" | awk -v name="$1" '
        { f = $3; sub(/\..*/, "", f) }
        f == "mha__" name { print $3 }'); do
        $objdump -d --no-show-raw-insn --disassemble="$f" "$obj"
    done >"$dir/$cc.$1.s"
    awk -v title="$cc $1" -v tile="$2" -v may="${3:-0}" '
        /^ *[0-9a-f]+:\t/ {
            address = $1
            sub(/:/, "", address)
            at[address] = ++n
            op[n] = $2
            text[n] = $0
            # The operand in front of <name+offset> is where a jump goes.
            for (i = 3; i < NF; i++) if ($(i + 1) ~ /^</ && target[n] == "") target[n] = $i
            if ($0 ~ /mov +%rsp,%rbp/) frame = 1 # else rbp is a register like any other
        }
        END {
            for (i = 1; i <= n; i++) {
                fma[i] = op[i] ~ /^(vfmadd|fmla)/
                total += fma[i]
                if (op[i] ~ /^(call|bl$|blr)/ && !(text[i] ~ /<[^+>]*>/ && target[i] in at)) calls++
                if (op[i] !~ /^(j|b$|b\.|cb|tb)/ || target[i] == "") continue
                if (!(target[i] in at)) calls++
                else if (at[target[i]] <= i) from[i] = at[target[i]]
            }
            for (end in from) {
                innermost = 1
                for (other in from)
                    if (other + 0 < end + 0 && from[other] >= from[end]) innermost = 0
                if (!innermost) continue
                count = 0
                store = ""
                for (i = from[end]; i <= end + 0; i++) {
                    count += fma[i]
                    if (text[i] !~ /\(%rsp|\[sp/ && !(frame && text[i] ~ /\(%rbp/)) continue
                    # x86 writes its last operand, if that is not only compared.
                    if (op[i] ~ /^st/ || (text[i] ~ /\)$/ && op[i] !~ /^(cmp|test)/)) store = text[i]
                    else read[end]++
                }
                if (!count) continue
                loops++
                reads += read[end]
                if (count > longest) longest = count
                if (store != "") spills = spills "\n    in a loop of " count " multiply-adds:" store
            }
            printf "%s: %d multiply-adds, %d in the longest of %d inner loops, %d reads of the stack\n",
                title, total, longest, loops, reads
            if (!n) bad("there is no such function")
            else if (!total) bad("no multiply-add")
            else if (!longest || longest % tile) bad("the longest inner loop is not that of a tile of " tile)
            if (calls > may) bad(calls " calls")
            if (spills) bad("stores to the stack" spills)
            exit failed
        }
        function bad(what) { print "FAIL " title ": " what; failed = 1 }
    ' "$dir/$cc.$1.s" || status=1
}

# compile NAME COMMAND: makes $obj. Fails, and says so, if it cannot.
compile() {
    cc=$1 obj=$dir/$1.o
    shift
    command -v "$1" >/dev/null || { echo "skip $cc ($1 is not installed)"; return 1; }
    command -v "$objdump" >/dev/null || { echo "skip $cc ($objdump is not installed)"; return 1; }
    echo '#include <math.h>' >$dir/probe.c
    "$@" -c -o $dir/probe.o $dir/probe.c 2>$dir/probe.log ||
        { echo "skip $cc ($* does not work here: $(head -n 1 $dir/probe.log))"; return 1; }
    "$@" -O2 $flags -I. -c -o "$obj" $dir/mha.c || { echo "FAIL $cc: it does not compile"; status=1; return 1; }
}

x86() {
    kernel gemm_avx2 12 2 # 6 rows x 2 registers; mha__pairs_avx2, from two places
    kernel pairs_avx2 8 # 2 rows x 2 panels
    kernel gemm_avx512 24 1 # 6 rows x 4 registers; mha__gemm_avx2, for a few panels of a few rows
    [ $cc = clang ] || kernel dots_avx512 16 # 16 dims; clang keeps addresses on the stack
    kernel narrow_1x4_avx2 8 # one row x 4 panels
    kernel narrow_4x1_avx2 8 # 4 rows x 2 registers
    kernel narrow_1x4_avx512 4 1 # one row x 4 panels; mha__narrow_1x4_avx2
    kernel narrow_avx512 16 2 # 4 rows x 4 panels; mha__narrow_1x4_avx512 and mha__narrow_avx2
    kernel softmax_avx2 6 # the polynomial of 2^x
    kernel softmax_avx512 6
}
neon() {
    kernel gemm_neon 16 # 4 rows x 4 registers
    kernel softmax_neon 6 1 # mha__exp2, once a row
}

flags=$*
objdump=objdump nm=nm
case $(uname -m) in
x86_64)
    compile gcc gcc && x86
    compile clang clang && x86
    ;;
*) echo "skip x86-64 (this machine is $(uname -m))" ;;
esac
objdump=aarch64-linux-gnu-objdump nm=aarch64-linux-gnu-nm
compile gcc-aarch64 aarch64-linux-gnu-gcc && neon
compile clang-aarch64 clang --target=aarch64-linux-gnu && neon
exit $status
