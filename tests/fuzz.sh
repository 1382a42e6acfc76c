#!/bin/sh
# make fuzz: tests/fuzz.c, inputs made of bytes against the oracle. Builds what this machine has (a
# program under gcc's sanitizers, libFuzzer, AFL++), replays tests/corpus, then fuzzes.
#   FUZZ_SECONDS  how long, 120 by default; AFL++ gets a fifth of it. 0: replay only
#   FUZZ_JOBS     libFuzzers at the same time; default: one per core
#   FUZZ_KEEP     1: of all inputs, those that reach all that is reached become tests/corpus
# A finding fails, and its input is left in build/fuzz/.
cd "$(dirname "$0")/.." || exit 1
seconds=${FUZZ_SECONDS:-120} jobs=${FUZZ_JOBS:-$(nproc 2>/dev/null || echo 1)}
out=build/fuzz failed=
rm -rf $out && mkdir -p $out/seeds $out/found

# No stack of every malloc, and little kept of what was freed: three times as many inputs a second.
export ASAN_OPTIONS=quarantine_size_mb=8:malloc_context_size=0:abort_on_error=1
common="-std=c99 -O1 -g -Wall -Wextra -Itests/standin"
asan="-fsanitize=address,undefined -fno-sanitize-recover=all"

fail() {
    echo "FAIL $1"
    failed=1
}

# build NAME CC FLAGS LINK: FLAGS for fuzz.c, which has mha.h in it; not for the oracle, which is
# not what is to be covered.
build() {
    name=$1 cc=$2
    command -v "$cc" >/dev/null || { echo "skip $name ($cc is not installed)"; return 1; }
    entry=main
    case $4 in *fuzzer*) entry=LLVMFuzzerTestOneInput ;; esac
    echo "int $entry(void) { return 0; }" >$out/probe.c
    $cc $4 -o $out/probe $out/probe.c >$out/probe.log 2>&1 ||
        { echo "skip $name ($cc $4 does not work here: $(head -n 1 $out/probe.log))"; return 1; }
    { $cc $common $asan $3 -c -o $out/$name-fuzz.o tests/fuzz.c &&
        $cc $common $asan -c -o $out/$name-oracle.o tests/oracle.c &&
        $cc $common $asan -c -o $out/$name-support.o tests/support.c &&
        $cc $4 -o $out/$name $out/$name-*.o -lm -pthread; } >$out/$name.log 2>&1 && return
    head -n 20 $out/$name.log
    fail "$name does not build"
    return 1
}

# run NAME COMMAND...: its log is in NAME.log; what it found is shown.
run() {
    log=$out/$1.log
    shift
    "$@" >"$log" 2>&1 && return
    grep -E -A 20 '^fuzz:|ERROR:|runtime error' "$log" | head -n 30
    fail "$*; see $log"
    return 1
}

if build replay gcc -DFUZZ_MAIN "$asan" || build replay clang -DFUZZ_MAIN "$asan"; then
    run replay $out/replay tests/corpus && echo "ok replay: $(tail -n 1 $out/replay.log)"
    $out/replay --unpack $out/seeds tests/corpus >/dev/null
fi

# Comparisons are not traced: no byte stands for itself, and it would take half of the time.
if build libfuzzer clang "-fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp" \
    "$asan -fsanitize=fuzzer"; then
    limit="-max_total_time=$seconds"
    [ "$seconds" -gt 0 ] || limit="-runs=0" jobs=1
    for i in $(seq "$jobs"); do
        { run libfuzzer-$i $out/libfuzzer $limit -timeout=20 -max_len=400 -len_control=0 -entropic=0 \
            -print_final_stats=1 -artifact_prefix=$out/ $out/found $out/seeds || : >$out/failed; } &
    done
    wait
    [ ! -e $out/failed ] || failed=1
    sed -n 's/^stat::number_of_executed_units: *//p' $out/libfuzzer-*.log | awk -v s="$seconds" \
        -v j="$jobs" '{ n += $1 } END { printf "libfuzzer: %d inputs in %d s, %d at a time\n", n, s, j }'
    if [ "$FUZZ_KEEP" = 1 ] && [ -z "$failed" ]; then
        mkdir -p $out/kept
        run merge $out/libfuzzer -set_cover_merge=1 -use_counters=0 $out/kept $out/found $out/seeds &&
            for f in $out/kept/*; do od -An -v -tx1 "$f" | tr -d ' \n' && echo; done |
            awk '{ print length($0), $0 }' | sort -n | cut -d ' ' -f 2 >tests/corpus/inputs.txt
    fi
    seconds=$((seconds / 5))
fi

if [ "$seconds" -gt 0 ] && build afl afl-clang-fast -DFUZZ_MAIN "$asan"; then
    export AFL_NO_UI=1 AFL_NO_AFFINITY=1 AFL_SKIP_CPUFREQ=1 AFL_BENCH_UNTIL_CRASH=1
    export AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0:symbolize=0
    run afl-run afl-fuzz -V "$seconds" -m none -t 20000 -i $out/seeds -o $out/afl-out -- $out/afl
    sed -n 's/^execs_done *: */afl: inputs: /p' $out/afl-out/default/fuzzer_stats
    for f in $out/afl-out/default/crashes/id* $out/afl-out/default/hangs/id*; do
        [ ! -e "$f" ] || fail "afl found $f"
    done
fi
ls $out/crash-* $out/timeout-* $out/oom-* 2>/dev/null | sed "s|^|again: $out/libfuzzer |"
[ -z "$failed" ]
