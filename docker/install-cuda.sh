#!/usr/bin/env bash
# Install the parts of CUDA that DeepSpeed's operations are compiled with, from NVIDIA's package repository.
#
#     install-cuda.sh 13.0
#
# The repository is added if the base image does not have it, and only with NVIDIA's key.
set -euo pipefail

: "${REPOSITORIES:=https://developer.download.nvidia.com/compute/cuda/repos}"
: "${KEY_FILE:=3bf863cc.pub}"
: "${KEY_FINGERPRINT:=EB693B3035CD5710E231E123A4B469963BF863CC}"
: "${ROOT:=}"

# The compiler; the headers and libraries that torch's headers name; cuda_profiler_api.h, which DeepSpeed's sources name.
readonly PARTS=(cuda-nvcc cuda-cudart-dev cuda-profiler-api libcublas-dev libcusparse-dev libcusolver-dev libcurand-dev)

fail() {
    echo "install-cuda: $*" >&2
    exit 1
}

# distribution: print the distribution's name and version as NVIDIA writes them, ubuntu2404 or debian12.
distribution() {
    # shellcheck source=/dev/null
    (. "$ROOT/etc/os-release" && echo "$ID${VERSION_ID//./}")
}

has_repository() { grep -rqsF "$REPOSITORIES" "$ROOT/etc/apt/sources.list" "$ROOT/etc/apt/sources.list.d"; }

add_repository() {
    local name keyring=$ROOT/usr/share/keyrings/cuda-archive-keyring.gpg work url found
    name=$(distribution)
    case $name in
        ubuntu2404 | debian12) ;;
        *) fail "$name: NVIDIA's repository for it is not known here; expected ubuntu2404 or debian12" ;;
    esac
    url=$REPOSITORIES/$name/$(uname -m)
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # expand the folder's name now
    trap "rm -rf '$work'" EXIT
    curl --fail --silent --show-error --location --retry 3 --output "$work/key" "$url/$KEY_FILE" ||
        fail "$url/$KEY_FILE: cannot be fetched"
    found=$(GNUPGHOME=$work gpg --batch --show-keys --with-colons "$work/key" | awk -F: '$1 == "fpr" { print $10; exit }')
    [ "$found" = "$KEY_FINGERPRINT" ] || fail "$url/$KEY_FILE: fingerprint $found; expected $KEY_FINGERPRINT"
    mkdir -p "${keyring%/*}" "$ROOT/etc/apt/sources.list.d"
    GNUPGHOME=$work gpg --batch --yes --dearmor --output "$keyring" "$work/key"
    echo "deb [signed-by=$keyring] $url/ /" >"$ROOT/etc/apt/sources.list.d/cuda.list"
}

main() {
    [[ $# == 1 && $1 =~ ^[0-9]+\.[0-9]+$ ]] || fail "${*:-nothing}; expected a version of CUDA, such as 13.0"
    has_repository || add_repository
    apt-get update
    apt-get install --yes --no-install-recommends "${PARTS[@]/%/-${1/./-}}"
    rm -rf "$ROOT"/var/lib/apt/lists/*
}

main "$@"
