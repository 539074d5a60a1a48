#!/usr/bin/env bash
# Build the image of docker/ and convert it for Enroot, on a machine that has both; needed once, and after changes.
#
#     slurm/setup-pyxis.sh /fsx/zeropods.sqsh
#     TORCH_CUDA_ARCH_LIST="9.0" slurm/setup-pyxis.sh /fsx/hopper.sqsh
#
# CUDA_VERSION must be the CUDA of the torch in requirements.txt: the build fails if it is another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${BASE_IMAGE:=python:3.11-bookworm}"  # SLURM needs nothing from CML
: "${CUDA_VERSION:=13.0}"
: "${TORCH_CUDA_ARCH_LIST:=8.0 8.6 8.9 9.0 10.0 10.3}"
: "${EFA_VERSION:=}"                     # AWS's fast network: a version of its installer, such as 1.51.0
: "${DOCKERFILE:=docker/Dockerfile}"
: "${TAG:=zeropods:cuda$CUDA_VERSION}"

fail() {
    echo "setup-pyxis: $*" >&2
    exit 1
}

main() {
    [ $# = 1 ] || fail "expected one argument: the .sqsh file to make, in a folder that all nodes see"
    local out=$1 program
    case $out in /*.sqsh) ;; *) fail "$out: expected an absolute path that ends in .sqsh" ;; esac
    [ -d "${out%/*}" ] || fail "${out%/*}: no such folder"
    [ -w "${out%/*}" ] || fail "${out%/*}: cannot be written by $(id -un)"
    for program in docker enroot; do
        command -v "$program" >/dev/null || fail "$program: not there; run this where Docker and Enroot are installed"
    done
    [ -f "$DOCKERFILE" ] || fail "DOCKERFILE $DOCKERFILE: not there"
    docker build --file "$DOCKERFILE" --build-arg "CUDA_VERSION=$CUDA_VERSION" \
        --build-arg "TORCH_CUDA_ARCH_LIST=$TORCH_CUDA_ARCH_LIST" --build-arg "BASE_IMAGE=$BASE_IMAGE" \
        --build-arg "EFA_VERSION=$EFA_VERSION" --tag "$TAG" .
    # It is made beside the old image first, so that a job that starts meanwhile finds the old or the new one.
    rm -f "$out.new"
    enroot import --output "$out.new" "dockerd://$TAG"
    mv "$out.new" "$out"
    echo "setup-pyxis: $out"
}

main "$@"
