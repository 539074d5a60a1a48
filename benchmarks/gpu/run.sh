#!/usr/bin/env bash
# Measure on this machine's GPU, without a network, what one part of a session lists, within so many seconds.
#
#     bash PACK/run.sh a 230                        # the first facts
#     bash PACK/run.sh b 405                        # the tables
#     bash PACK/run.sh c 560                        # what is compiled first
#     bash PACK/run.sh d 200                        # a decoder-only model of today
#     bash PACK/run.sh e 330                        # what people type, a probe first
#     bash PACK/run.sh f 330                        # plans by that probe, beside runs
#     bash PACK/run.sh g 400                        # the notebooks of `make demo`
#     bash PACK/run.sh a 240 --device cpu           # no GPU: does it work?
#     bash PACK/run.sh a 230 --without transformers # with the machine's own instead of the pack's
#
# Run it in the root of the project that made the pack. What was measured comes to $OUT (build/gpu).
set -euo pipefail

began=$(date +%s.%N)
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-build/gpu}
without=()
words=()

fail() { echo "run.sh: $*" >&2; exit 2; }

[ $# -ge 2 ] || fail "give a part, a to g, and a number of seconds: bash $pack/run.sh a 230"
part=$1
seconds=$2
shift 2
while [ $# -gt 0 ]; do
    if [ "$1" = --without ]; then
        [ $# -ge 2 ] || fail "--without: give the name of a package"
        without+=("${2//-/_}")
        shift 2
    else
        words+=("$1")
        shift
    fi
done
[ -f benchmarks/gpu/session.py ] || fail "$PWD: is not the root of zeropods; change to it first"
command -v "$python" >/dev/null || fail "$python: not found; say where Python is with PYTHON="

# Unpacked once for each pack and each choice of wheels.
digest=$(cat "$pack/pack.json" <(echo "${without[*]-}") | sha256sum | cut -c1-12)
work=${WORK:-${TMPDIR:-/tmp}/zeropods-gpu-$(id -u)-$digest}
site=$work/site
if [ ! -f "$work/complete" ]; then
    mkdir -p "$site" || fail "$work: cannot be made; set WORK= to another place"
    unpacking=()
    for wheel in "$pack"/wheels/*.whl; do
        name=$(basename "$wheel")
        if [[ " ${without[*]-} " == *" ${name%%-*} "* ]]; then continue; fi
        "$python" -m zipfile -e "$wheel" "$site" 2>/dev/null &
        unpacking+=($!)
    done
    tar -C "$work" -xzf "$pack/data.tar.gz" 2>/dev/null || fail "$work: cannot be unpacked there; free some space, or set WORK="
    for process in "${unpacking[@]}"; do
        wait "$process" || fail "$site: cannot be unpacked there; free some space, or set WORK="
    done
    touch "$work/complete"
fi

export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
# Templates of pages, which an installer would have moved out of these folders.
shopt -s nullglob
for share in "$site"/*.data/data/share/jupyter; do
    export JUPYTER_PATH=$share${JUPYTER_PATH:+:$JUPYTER_PATH}
done
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" -m benchmarks.gpu.session "$part" --seconds "$seconds" --began "$began" \
    --pack "$pack" --data "$work/data" --out "$out" --work "$work/out" ${words[@]+"${words[@]}"}
