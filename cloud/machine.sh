# shellcheck shell=bash
# Functions that the scripts of both machines source: check the GPUs, set up, fetch the data, train.
#
# Parameters come from the environment.

WIKITEXT=data/wikitext-2
: "${DATA:=$WIKITEXT}"                # a folder of text, or a hub id; WikiText-2 is fetched if it is missing
: "${PYTHON:=.venv/bin/python}"       # made by tools/setup, which the script runs first
: "${DRY_RUN:=}"                      # if not empty: print what would be run, and run nothing

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# kind WORD ...: print quick or full; 1 and 2 are the words of the template that these scripts replace.
kind() {
    case $* in
        quick | 1) echo quick ;;
        full | 2) echo full ;;
        *) fail "expected quick (1) or full (2)${1:+, not $*}" ;;
    esac
}

# need_gpus COUNT: fail without the GPUs that the settings were chosen for: nobody planned memory and time for fewer.
need_gpus() {
    local listed='' count
    GPUS=$1
    if [ "$DRY_RUN" ]; then return; fi
    if command -v nvidia-smi >/dev/null; then listed=$(nvidia-smi --list-gpus); fi
    count=$(grep -c '^GPU' <<<"$listed" || true)
    [ "$count" = "$1" ] || fail "$count GPUs here; expected $1: rent another machine, or see docs/cloud.md"
}

set_up() {
    if [ "$DRY_RUN" ]; then return; fi
    tools/setup
    if [ "$DATA" = "$WIKITEXT" ] && [ ! -e "$DATA" ]; then "$PYTHON" -m zeropods data get wikitext-2 --out "$DATA"; fi
}

# has_module NAME: whether the interpreter has a Python package.
has_module() { "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

# train NAME FLAG ...: run causal_train.py on every GPU of this machine, into runs/NAME, and summarize the run.
train() {
    local name=$1
    shift
    "$PYTHON" -m zeropods launch --launcher none --slots "$GPUS" ${DRY_RUN:+--dry-run} -- causal_train.py \
        --task lm --data "$DATA" --outputdir "runs/$name" "$@"
    if [ -z "$DRY_RUN" ]; then "$PYTHON" -m zeropods summary "runs/$name" --out "runs/$name-summary"; fi
}
