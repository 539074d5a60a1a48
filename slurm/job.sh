# shellcheck shell=bash
# What every job here does; the .sbatch files source it: parameters, one step on all nodes, signals, requeue.
#
# Parameters come from the environment of sbatch. docs/slurm.md says more of each.

: "${PROJECT:=$SLURM_SUBMIT_DIR}"                # this project's folder, under the same path on every node
: "${PYTHON:=$PROJECT/.venv/bin/python}"         # the interpreter that runs the script
: "${SCRIPT:=textsql_train.py}"                  # the training script; words after the .sbatch file replace it
: "${ARGUMENTS:=}"                               # its arguments, split at blanks; or as words after the script
: "${SLOTS:=}"                                   # processes per node; its GPUs if not given, 1 where there is none
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"      # where the processes meet, on the first node
: "${CUDA_VERSION:=}"                            # take CUDA from /usr/local/cuda-VERSION
: "${TORCH_CUDA_ARCH_LIST:=8.0 8.6 8.9 9.0 10.0 10.3}"     # for operations that are compiled on first use
: "${MOUNT:=}"                                   # a shared folder that every node must have, such as /fsx
: "${NCCL_SOCKET_IFNAME:=^lo,docker}"            # network interfaces to leave out (^) or to take
: "${SAVE_SECONDS:=100}"                         # from the time limit's signal until the job requeues itself anyway
: "${MAX_RESTARTS:=100}"                         # a job that was requeued so often ends instead
: "${MEMORY_LOG:=$PWD/slurm-$SLURM_JOB_ID.memory}"         # + .NODE.csv: nvidia-smi's log, where there are GPUs
export PROJECT PYTHON SLOTS MASTER_PORT CUDA_VERSION TORCH_CUDA_ARCH_LIST MOUNT NCCL_SOCKET_IFNAME MEMORY_LOG

SAVED=75         # EX_TEMPFAIL: how a rank ends that was asked to save, and has
WAIT_SECONDS=40  # how long nodes may go on after the first has ended; more than node.sh needs to end its ranks

fail() {
    echo "slurm: $*" >&2
    exit 1
}

# The nodes' addresses as SLURM itself reaches them, in the order of SLURM_NODEID. In a container nobody can ask.
node_addresses() {
    local name
    for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        scontrol --oneliner show node "$name" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    done | paste -sd ' '
}

state() { squeue --noheader --jobs "$SLURM_JOB_ID" --format %T; }

# A job that was cancelled, or that SLURM requeues itself, is not running any more.
requeue() {
    [ "$(state)" = RUNNING ] || return 0
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
        echo "slurm: restarted $MAX_RESTARTS times; not requeued" >&2
        return 0
    fi
    echo "slurm: requeued, to go on from the newest checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID" || true
}

# The time limit is near: the ranks save at their next step and end. Where they do not, their last checkpoint counts.
time_limit() {
    heard=yes
    echo "slurm: the time limit is near: asking the ranks to save" >&2
    scancel --signal=USR1 "$SLURM_JOB_ID" || true
    (sleep "$SAVE_SECONDS" && requeue) &
    late=$!
}

# train [SRUN OPTION ...] -- [SCRIPT [ARGUMENT ...]]: the script on every node, then this job's exit status.
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
    # srun does not inherit --cpus-per-task. A node that fails ends the others: --kill-on-bad-exit would tell them so by
    # SIGTERM, as a preemption does, in which there is something to save; here they have some time for their records.
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
