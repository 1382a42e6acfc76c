#!/bin/sh
# make analyze: what gcc -fanalyzer, clang-tidy (.clang-tidy says which checks) and cppcheck say of
# mha.h: nothing, but for what is listed here with the reason. Two at a time.
cd "$(dirname "$0")/.." || exit 1
dir=build/analyze

# Not so: "WHERE IT IS FOUND, a fixed string" and why. A line of the report, or the line of code
# under it, that holds the string is not counted.
known() {
    cat <<'END'
if (!excluded[j])
Uninitialized variable: excluded
p.batch, p.head, p.t_hi, p.t_lo, p.c_hi, p.c_lo
END
    # 1, 2: mha__careful_step reads excluded[0 .. n-1] after it wrote [0 .. 16 ceil(n/16) - 1].
    # 3: mha__place_make leaves to each of its callers what only they know; they fill it in.
}

# clang's analyser does not follow mha__fail through its loop to the status it returns, and then
# goes on after "if (st != MHA_OK) return" with what was never filled in. Here it returns at once.
short() {
    sed '/^static mha_status mha__fail(/,/^}/ { /^{/,/^}/ c\
{ (void)why; (void)text; (void)name; (void)a; (void)b; return status; }
}' mha.h
}

run() {
    case $1 in
    gcc-analyzer)
        gcc -std=c99 -O1 -fanalyzer -DMHA_IMPLEMENTATION -DMHA_THREADS -x c -c -o $dir/a.o mha.h
        ;;
    clang-tidy)
        # clang analyses the functions of the file it is given, not those of a file it includes.
        short >$dir/mha.c
        clang-tidy --quiet --config-file=.clang-tidy $dir/mha.c -- -std=c99 -DMHA_IMPLEMENTATION -DMHA_THREADS
        ;;
    cppcheck)
        cppcheck -q --std=c99 --language=c --enable=warning,performance,portability \
            --suppress=missingIncludeSystem -DMHA_IMPLEMENTATION -DMHA_THREADS \
            --template='{file}:{line}: warning: {message} [{id}]\n{code}' mha.h
        ;;
    esac
}

one() {
    log=$dir/$1
    tool=${1%-analyzer}
    command -v "$tool" >/dev/null || { echo "skip $1 ($tool is not installed)"; return; }
    run "$1" >"$log" 2>&1 ||
        { tail -n 20 "$log"; echo "FAIL $1: exit status $?"; : >$dir/failed; return; }
    # A finding is a line with "warning:" or "error:"; the code is under it.
    known | awk -v name="$1" '
        FILENAME == "-" { if ($0 != "") string[++n] = $0; next }
        !/: (warning|error):/ { next }
        { found = $0; if ((getline code) <= 0) code = "" }
        {
            for (i = 1; i <= n; i++) if (index(found code, string[i])) { listed++; next }
            print found "\n" code
            bad++
        }
        END {
            if (bad) print "FAIL " name ": " bad " findings"
            else print "ok " name (listed ? ": but for " listed " that are listed" : "")
            exit bad > 0
        }' - "$log" || : >$dir/failed
}

if [ "$1" = --one ]; then
    one "$2"
    exit
fi
rm -rf $dir && mkdir -p $dir
printf '%s\n' clang-tidy gcc-analyzer cppcheck | xargs -P "${JOBS:-2}" -n 1 sh tests/analyze.sh --one
[ ! -e $dir/failed ]
