#!/bin/sh
# sh tests/cpu.sh FILE: seconds of a core that the children of a shell took, from what its "times"
# wrote to FILE: "0m1.23s 0m0.10s", its own on the first line and theirs on the second.
awk 'NR == 2 { split($1, u, /[ms]/); split($2, s, /[ms]/)
    printf "%.2f\n", u[1] * 60 + u[2] + s[1] * 60 + s[2] }' "$1"
