#!/usr/bin/env bash
# Point /usr/local/cuda at the CUDA that torch was built with, then have DeepSpeed report what it can compile and run.
#
#     zeropods-cuda                   in a session of CML: !zeropods-cuda
#     zeropods-cuda --no-report
#
# DeepSpeed compiles operations at their first use, with the compiler below CUDA_HOME, and refuses any other CUDA.
set -euo pipefail

: "${PREFIX:=/usr/local}"  # folder that holds CUDA, as PREFIX/cuda-13.0
: "${PYTHON:=python3}"     # interpreter whose torch is meant

fail() {
    echo "zeropods-cuda: $*" >&2
    exit 1
}

# torch_cuda: print the CUDA that torch was built with, or an empty line if without; torch itself is not loaded.
torch_cuda() {
    "$PYTHON" - <<'END'
import runpy, sys
from importlib.util import find_spec
from pathlib import Path

torch = find_spec("torch")
if torch is None or torch.origin is None:
    sys.exit("zeropods-cuda: no torch for " + sys.executable + "; install requirements.txt first")
print(runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] or "")
END
}

# installed: print the versions of CUDA that are installed with their compiler.
installed() {
    local compiler
    for compiler in "$PREFIX"/cuda-*/bin/nvcc; do
        if [ -x "$compiler" ]; then basename "${compiler%/bin/nvcc}"; fi
    done | paste -sd ' '
}

point_at() {
    local version=$1 link=$PREFIX/cuda folder=$PREFIX/cuda-$1 there
    if [ ! -x "$folder/bin/nvcc" ]; then
        there=$(installed)
        fail "$folder: no compiler there, and torch is built with CUDA $version; there is ${there:-none}"
    fi
    if [ -e "$link" ] && [ ! -L "$link" ]; then fail "$link: is no link; set CUDA_HOME=$folder instead"; fi
    if [ "$(readlink -f "$link")" = "$(readlink -f "$folder")" ]; then
        echo "$link is $folder"
    elif [ -w "$PREFIX" ]; then
        # The link is moved into place, so that a compiler that starts meanwhile finds the old or the new CUDA.
        ln -s "$folder" "$link.$$"
        mv -T "$link.$$" "$link"
        echo "$link is now $folder"
    else
        fail "$link: cannot be changed by $(id -un); set CUDA_HOME=$folder instead"
    fi
}

main() {
    local version
    if [ $# != 0 ] && [ "$*" != --no-report ]; then fail "$*; expected nothing or --no-report"; fi
    version=$(torch_cuda)
    if [ -n "$version" ]; then
        point_at "$version"
    else
        echo "torch is built without CUDA: $PREFIX/cuda stays as it is"
    fi
    if [ $# = 0 ]; then "$PYTHON" -m deepspeed.env_report; fi
}

main "$@"
