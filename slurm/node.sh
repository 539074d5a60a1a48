#!/usr/bin/env bash
# The part of a job on one node, run by srun with what job.sh exports: a process for each slot, and a memory log.
#
#     node.sh SCRIPT [ARGUMENT ...]
#
# The processes are ranks of torch.distributed, which meet on the first node. This script itself starts each of them:
# an agent in between would hide their exit status, and answer SLURM's signals in its own way.
set -euo pipefail

readonly TERM_SECONDS=10 KILL_SECONDS=25  # after the first failure: time for the others to say why

fail() {
    echo "slurm: ${SLURMD_NODENAME:-?}: $*" >&2
    exit 1
}

gpus() {
    local listed=''
    if command -v nvidia-smi >/dev/null; then listed=$(nvidia-smi --list-gpus 2>/dev/null || true); fi
    grep -c '^GPU' <<<"$listed" || true
}

# Check and set what this node provides: interpreter, shared folder, CUDA, slots.
prepare() {
    command -v "$PYTHON" >/dev/null || fail "PYTHON $PYTHON: not there; run make setup, or give another"
    [ -z "$MOUNT" ] || [ -d "$MOUNT" ] || fail "MOUNT $MOUNT: not there; mount it, or give another folder"
    if [ "$CUDA_VERSION" ]; then
        export CUDA_HOME=/usr/local/cuda-$CUDA_VERSION
        [ -d "$CUDA_HOME" ] || fail "CUDA_VERSION $CUDA_VERSION: no $CUDA_HOME; unset it, or install it"
        export PATH=$CUDA_HOME/bin:$PATH LD_LIBRARY_PATH=$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    if [ -z "$SLOTS" ]; then
        SLOTS=$(gpus)
        if [ "$SLOTS" = 0 ]; then SLOTS=1; fi
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((${SLURM_CPUS_PER_TASK:-1} + SLOTS - 1) / SLOTS))}
    export ZEROPODS_POD=$SLURMD_NODENAME ZEROPODS_SAVE_SIGNAL=USR1
}

# Log memory as the BLOOM workshop does: the fourth column is memory.used, in MiB.
log_memory() {
    if command -v nvidia-smi >/dev/null; then
        (trap '' USR1; exec nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv --loop=1) \
            >>"$MEMORY_LOG.$SLURMD_NODENAME.csv" 2>&1 &
        memory=$!
    fi
}

# Note how a process ended, for zeropods/measure/exits.py: one that was killed cannot say so itself.
note() {
    local pid=$1 status=$2
    [ "${EXITS:-}" ] || return 0
    # What bash says of a process that a signal has killed is 128 and the signal's number.
    if [ "$status" -gt 128 ]; then status=$((128 - status)); fi
    mkdir -p "$EXITS" || return 0
    printf \
        '{"exit": {"rank": %d, "host": "%s", "pid": %d, "status": %d, "ended_unix_seconds": %s}}\n' \
        "${numbers[$pid]}" "$ZEROPODS_POD" "$pid" "$status" "${EPOCHREALTIME/,/.}" \
        >"$EXITS/${numbers[$pid]}.exit" || true
}

# Start the ranks. One that is still starting ignores the signal that asks it to save, and does not die of it.
start() {
    local slot first number
    if [ "$((SLURM_NNODES * SLOTS))" -gt 1 ]; then
        first=${ADDRESSES%% *}
        export MASTER_ADDR=$first MASTER_PORT WORLD_SIZE=$((SLURM_NNODES * SLOTS)) LOCAL_WORLD_SIZE=$SLOTS
    fi
    for ((slot = 0; slot < SLOTS; slot++)); do
        number=$((SLURM_NODEID * SLOTS + slot))
        # A job that was requeued has left the note of an earlier process.
        if [ "${EXITS:-}" ]; then rm -f "$EXITS/$number.exit"; fi
        (
            trap '' USR1
            if [ "${WORLD_SIZE:-}" ]; then export RANK=$number LOCAL_RANK=$slot; fi
            exec "$PYTHON" -u "$@"
        ) &
        ranks+=("$!")
        numbers[$!]=$number
    done
}

signal() { kill "-$1" "${ranks[@]}" 2>/dev/null || true; }

# Keep the ranks that still run; the status of the first one that failed becomes the node's.
reap() {
    local rank code left=()
    for rank in "${ranks[@]}"; do
        if kill -0 "$rank" 2>/dev/null; then
            left+=("$rank")
            continue
        fi
        wait "$rank" && code=0 || code=$?
        note "$rank" "$code"
        if [ "$code" != 0 ] && [ "$status" = 0 ]; then status=$code failed=$SECONDS; fi
    done
    ranks=("${left[@]+"${left[@]}"}")
}

# Wait until every rank has ended. Both of SLURM's signals mean that there is something to save: the time limit's, which
# job.sh sends, and SIGTERM, which comes before a preemption and with a cancellation.
follow() {
    local nap
    exec {nap}<> <(:)
    while [ "${#ranks[@]}" -gt 0 ]; do
        read -r -t 1 -u "$nap" || true
        if [ "$asked" ]; then signal USR1; fi
        if [ "$failed" ] && [ "$((SECONDS - failed))" -ge "$TERM_SECONDS" ]; then signal TERM; fi
        if [ "$failed" ] && [ "$((SECONDS - failed))" -ge "$KILL_SECONDS" ]; then signal KILL; fi
        reap
    done
}

main() {
    local script=$1 status=0 asked='' failed='' memory='' ranks=()
    local -A numbers=()
    shift
    prepare
    [ -f "$script" ] || script=$PROJECT/$script
    [ -f "$script" ] || fail "$script: no such script"
    trap 'asked=yes' USR1 TERM
    log_memory
    start "$script" "$@"
    follow
    if [ "$memory" ]; then
        kill "$memory" || true
        wait "$memory" || true
    fi 2>/dev/null
    exit "$status"
}

main "$@"
