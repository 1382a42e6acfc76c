#!/bin/sh
# Does the README tell the truth? Each fenced block of code in it is a test.
#
#   c     with "int main": a program. Compiled alone with mha.h, run, must return 0.
#         after a line <!-- test: in main -->: statements. Compiled in the main() of a program
#         that begins with tests/readme_prelude.c, and run; a status "st" must be MHA_OK at the end.
#         after a line <!-- test: at file scope -->: declarations. Compiled after mha.h.
#   text  introduced by a line with "prints": what the c block before it must print.
#   sh    lines that begin with make: that target exists. With cc: compiled, from the program
#         before or from the file of that name in this tree.
cd "$(dirname "$0")/.." || exit 1
top=$PWD dir=$PWD/build/readme pass=0 fail=0
: "${CC:=cc}" "${MAKE:=make}"
rm -rf "$dir" && mkdir -p "$dir/alone" && cp mha.h "$dir/alone" || exit 1
tab=$(printf '\t')

# Each block goes to a file; the index says number, line, language, "prints", directive.
awk -v dir="$dir" '
/^ *```/ && !on {
    on = 1
    n++
    lang = $0
    sub(/^ *``` */, "", lang)
    test = "-"
    if (match(prev, /<!-- test: .* -->/)) test = substr(prev, RSTART + 11, RLENGTH - 15)
    printf "%d\t%d\t%s\t%s\t%s\n", n, NR, lang == "" ? "text" : lang, prev ~ /prints/, test
    file = dir "/" n
    printf "" >file
    next
}
/^ *```/ { on = 0; prev = ""; close(file); next }
on { print >file; next }
/[^ ]/ { prev = $0 }
END { if (on) printf "0\t%d\tunclosed\t-\t-\n", NR }' README.md >"$dir/index" || exit 1

# check NAME COMMAND...: one test.
check() {
    name=$1
    shift
    if "$@" >"$dir/log" 2>&1; then
        pass=$((pass + 1)) && echo "ok $name"
    else
        fail=$((fail + 1)) && sed 's/^/  /' "$dir/log" && echo "FAIL $name"
    fi
}
no() { echo "$*"; false; }

compile() { $CC -Wall -Wextra -Wno-unused -Wno-unknown-pragmas -Werror -I. "$@" -lm -pthread; }
program() {
    cp "$dir/$1" "$dir/alone/main.c" &&
        (cd "$dir/alone" && $CC -O2 -Wall -Wextra -Werror -o "$dir/$1.exe" main.c -lm -pthread) &&
        "$dir/$1.exe"
}
in_main() {
    end='return 0;'
    grep -q 'mha_status *st ' "$dir/$1" && end='return st != MHA_OK;'
    { cat tests/readme_prelude.c && echo 'int main(void) {' && echo "#line $(($2 + 1)) \"README.md\"" &&
        cat "$dir/$1" && echo "; $end }"; } >"$dir/$1.c" && compile -o "$dir/$1.exe" "$dir/$1.c" &&
        "$dir/$1.exe"
}
file_scope() {
    { echo '#include "mha.h"' && echo "#line $(($2 + 1)) \"README.md\"" && cat "$dir/$1"; } >"$dir/$1.c" &&
        compile -c -o "$dir/$1.o" "$dir/$1.c"
}
prints() { "$dir/$2.exe" | diff "$dir/$1" -; }
make_line() { $MAKE -n ${1#make} >/dev/null; }
cc_line() {
    for word in $1; do
        case $word in *.c)
            from=$dir/alone/main.c
            [ -f "$word" ] && from=$word
            mkdir -p "$dir/cc/$(dirname "$word")" && cp mha.h "$dir/cc" && cp "$from" "$dir/cc/$word" || return 1 ;;
        esac
    done
    (cd "$dir/cc" && eval "$1")
}

last= # the block whose output a text block may show
while IFS=$tab read -r n line lang prints test; do
    at="README.md:$line"
    case $lang,$test in
    c,"in main") check "$at runs in main()" in_main "$n" "$line" && last=$n ;;
    c,"at file scope") check "$at compiles at file scope" file_scope "$n" "$line" ;;
    c,-)
        grep -q 'int main' "$dir/$n" || { check "$at" no "say how to test this: see tests/readme.sh"; continue; }
        check "$at runs" program "$n" && last=$n ;;
    sh,-)
        grep -q '^make' "$dir/$n" && last=
        sed 's/ *#.*//' "$dir/$n" >"$dir/$n.sh"
        while read -r command; do
            case $command in
            make | make\ *) check "$at $command" make_line "$command" ;;
            cc\ *) check "$at $command" cc_line "$command" ;;
            esac
        done <"$dir/$n.sh" ;;
    text,-) [ "$prints" = 0 ] || [ -z "$last" ] || check "$at is what it prints" prints "$n" "$last" ;;
    unclosed,*) check "$at" no "a \`\`\` is not closed" ;;
    *,-) ;; # other languages
    *) check "$at" no "cannot test: <!-- test: $test --> before a block of $lang" ;;
    esac
done <"$dir/index"

[ $((pass + fail)) -gt 0 ] || check "README.md" no "no code in it"
echo "Pass: $pass, fail: $fail, skip: 0."
[ $fail -eq 0 ]
