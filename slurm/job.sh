# shellcheck shell=bash
# The common part of all jobs, sourced by the .sbatch files: parameters, one step on all nodes, signals, requeue.
#
# Parameters come from the environment of sbatch. docs/slurm.md says more about each.

: "${PROJECT:=$SLURM_SUBMIT_DIR}"                # this project's folder, under the same path on every node
: "${PYTHON:=$PROJECT/.venv/bin/python}"         # the interpreter that runs the script
: "${SCRIPT:=textsql_train.py}"                  # the training script; words after the .sbatch file replace it
: "${ARGUMENTS:=}"                               # its arguments, split at blanks; or as further words after the script
: "${SLOTS:=}"                                   # processes per node; if not given, one per GPU, or 1 without GPUs
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"      # where the processes meet, on the first node
: "${CUDA_VERSION:=}"                            # take CUDA from /usr/local/cuda-VERSION
: "${TORCH_CUDA_ARCH_LIST:=8.0 8.6 8.9 9.0 10.0 10.3}"     # GPUs that operations are compiled for, on first use
: "${MOUNT:=}"                                   # a shared folder that every node must have, such as /fsx
: "${NCCL_SOCKET_IFNAME:=^lo,docker}"            # network interfaces to leave out (^) or to use
: "${SAVE_SECONDS:=100}"                         # from the time limit's signal until the job is requeued in any case
: "${MAX_RESTARTS:=100}"                         # a job that was requeued this many times ends instead
: "${MEMORY_LOG:=$PWD/slurm-$SLURM_JOB_ID.memory}"         # + .NODE.csv: nvidia-smi's log, where there are GPUs
: "${EXITS:=}"                                   # a folder for how each process ended; zeropods launch reads it
export PROJECT PYTHON SLOTS MASTER_PORT CUDA_VERSION TORCH_CUDA_ARCH_LIST MOUNT NCCL_SOCKET_IFNAME MEMORY_LOG EXITS

SAVED=75         # EX_TEMPFAIL: exit status of a rank that was asked to save, and has saved
WAIT_SECONDS=40  # how long nodes may go on after the first has ended; more than node.sh needs to end its ranks

fail() {
    echo "slurm: $*" >&2
    exit 1
}

# Print the nodes' addresses as SLURM reaches them, in the order of SLURM_NODEID. A container cannot ask SLURM for them.
node_addresses() {
    local name
    for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        scontrol --oneliner show node "$name" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    done | paste -sd ' '
}

state() { squeue --noheader --jobs "$SLURM_JOB_ID" --format %T; }

# Requeue the job. A job that was cancelled, or that SLURM itself requeues, is not running any more and is left alone.
requeue() {
    [ "$(state)" = RUNNING ] || return 0
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
        echo "slurm: restarted $MAX_RESTARTS times; not requeued" >&2
        return 0
    fi
    echo "slurm: requeued, to go on from the newest checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID" || true
}

# The time limit is near: ask the ranks to save at the next step and end. If they do not, their last checkpoint counts.
time_limit() {
    heard=yes
    echo "slurm: the time limit is near: asking the ranks to save" >&2
    scancel --signal=USR1 "$SLURM_JOB_ID" || true
    (sleep "$SAVE_SECONDS" && requeue) &
    late=$!
}

# train [SRUN OPTION ...] -- [SCRIPT [ARGUMENT ...]]: run the script on every node; returns this job's exit status.
train() {
    local options=() words=() status=0 step heard=yes late=''
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    read -r -a words <<<"$ARGUMENTS"
    if [ $# = 0 ]; then set -- "$SCRIPT" "${words[@]}"; fi
    ADDRESSES=$(node_addresses)
    export ADDRESSES
    trap time_limit USR1
    trap 'heard=yes' TERM
    # srun does not inherit --cpus-per-task. A node that fails ends the others: --kill-on-bad-exit would send SIGTERM,
    # which asks them to save, as in a preemption; --wait gives them some time to write their records instead.
    srun --label --wait="$WAIT_SECONDS" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        "${options[@]}" bash "$PROJECT/slurm/node.sh" "$@" &
    step=$!
    while [ "$heard" ]; do
        heard=''
        wait "$step" && status=0 || status=$?
    done
    if [ "$late" ]; then kill "$late" 2>/dev/null || true; fi
    if [ "$status" = "$SAVED" ]; then requeue; fi
    return "$status"
}
