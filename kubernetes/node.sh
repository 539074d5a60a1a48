#!/usr/bin/env bash
# One pod of the Indexed Job of train.yaml: a process for each slot, as on a node of a SLURM job.
#
#     node.sh SCRIPT [ARGUMENT ...]
#
# It tells slurm/node.sh, in SLURM's words, which pod this is and where the first one is found. That script starts the
# ranks itself and answers SIGTERM, with which Kubernetes ends a pod, by asking them to save. docs/kubernetes.md says
# more about each parameter, which the manifest sets.
set -euo pipefail

: "${JOB:?kubernetes: the name of the Job is not set; see kubernetes/train.yaml}"
: "${JOB_COMPLETION_INDEX:?kubernetes: not a pod of an Indexed Job; see kubernetes/train.yaml}"
: "${PODS:?kubernetes: the number of pods is not set; see kubernetes/train.yaml}"
: "${SERVICE:=$JOB}"                          # the headless Service, which gives the pods their names
: "${FIRST_POD:=$JOB-0.$SERVICE}"             # where the processes meet
: "${MASTER_PORT:=29500}"
: "${PROJECT:=$PWD}"                          # this project's folder, on the volume of all pods
: "${PYTHON:=python3}"
: "${SLOTS:=}"                                # processes per pod; if not given, one per GPU, or 1 without GPUs
: "${MEMORY_LOG:=$PWD/$JOB.memory}"           # + .POD.csv: nvidia-smi's log, where there are GPUs
: "${NAME_SECONDS:=600}"                      # how long the first pod may take to have an address

# The cluster's DNS knows a pod only once it has an address, which takes as long as its image does to come.
# SIGTERM, with which Kubernetes ends a pod, ends the waiting, with the status that is not counted as a failure; the first
# process of a container would ignore it.
await_first_pod() {
    trap 'echo "kubernetes: asked to end before $FIRST_POD had an address" >&2; exit 75' TERM
    local deadline=$((SECONDS + NAME_SECONDS))
    until getent hosts "$FIRST_POD" >/dev/null; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "kubernetes: $FIRST_POD: no address after $NAME_SECONDS s; is the Service $SERVICE there?" >&2
            exit 1
        fi
        sleep 1 &
        wait $!
    done
}

await_first_pod
export PROJECT PYTHON SLOTS MASTER_PORT MEMORY_LOG CUDA_VERSION='' MOUNT='' EXITS=''
export ADDRESSES=$FIRST_POD SLURM_NNODES=$PODS SLURM_NODEID=$JOB_COMPLETION_INDEX
export SLURMD_NODENAME=$JOB-$JOB_COMPLETION_INDEX SLURM_CPUS_PER_TASK=${CPUS:-1}
exec bash "$PROJECT/slurm/node.sh" "$@"
