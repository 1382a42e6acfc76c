#!/bin/sh
# make bench-peers: gets the alternatives that mha.h is compared with, as far as they can be had
# here, then runs peers.py with the arguments given. Python packages go to build/venv-peers.
cd "$(dirname "$0")/../.." || exit 1
venv=build/venv-peers py=build/venv-peers/bin/python

if [ ! -x $py ]; then
    echo "making $venv" >&2
    mkdir -p build && "${PYTHON:-python3}" -m venv $venv || {
        echo "make bench-peers needs python3 with venv (Debian: python3-venv)" >&2
        rm -rf $venv
        exit 1
    }
fi

# package NAME PACKAGES...: installed unless it can be imported; else peers.py goes without.
package() {
    name=$1
    shift
    $py -c "import $name" 2>/dev/null && return
    echo "installing $* into $venv" >&2
    $py -m pip install --quiet --retries 1 --disable-pip-version-check "$@" >&2 ||
        echo "cannot install $*" >&2
}

openblas() {
    : "${CC:=cc}"
    flags=$(pkg-config --cflags --libs openblas 2>/dev/null || echo -lopenblas)
    for again in '' again; do
        printf '#include <cblas.h>\nint main(void) { return !cblas_sdot; }\n' |
            $CC -x c -o build/openblas-probe - $flags >/dev/null 2>&1 && return
        if [ -n "$again" ] || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
            echo "OpenBLAS is not here (Debian: libopenblas-dev)" >&2
            return
        fi
        echo "installing libopenblas-dev" >&2
        apt-get install -y --no-install-recommends libopenblas-dev >build/openblas.log 2>&1 || {
            apt-get update >>build/openblas.log 2>&1
            apt-get install -y --no-install-recommends libopenblas-dev >>build/openblas.log 2>&1
        }
        flags=$(pkg-config --cflags --libs openblas 2>/dev/null || echo -lopenblas)
    done
}

case " $* " in
*" --help "* | *" -h "*) ;;
*)
    openblas
    package onnx onnx
    package onnxruntime onnxruntime
    package torch torch # a few GB with what it brings
    ;;
esac
package numpy numpy
exec $py tests/peers/peers.py "$@"
