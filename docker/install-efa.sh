#!/usr/bin/env bash
# Install the libraries of AWS's Elastic Fabric Adapter: libfabric, and the plugin through which NCCL uses it.
#
#     install-efa.sh 1.51.0
#
# The installer is unpacked only if AWS's key has signed it. The kernel module belongs to the host, not to the image.
# Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-installer-containers.html
set -euo pipefail

: "${INSTALLERS:=https://efa-installer.amazonaws.com}"
: "${ROOT:=}"
: "${KEY_FINGERPRINT:=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC}"

fail() {
    echo "install-efa: $*" >&2
    exit 1
}

fetch() {
    curl --fail --silent --show-error --location --retry 3 --remote-name "$INSTALLERS/$1" ||
        fail "$INSTALLERS/$1: cannot be fetched"
}

main() {
    [[ $# == 1 && $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "${*:-nothing}; expected a version such as 1.51.0"
    local archive=aws-efa-installer-$1.tar.gz work signer
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # expand the folder's name now
    trap "rm -rf '$work'" EXIT
    cd "$work"
    export GNUPGHOME=$work
    fetch aws-efa-installer.key
    fetch "$archive"
    fetch "$archive.sig"
    gpg --batch --quiet --import aws-efa-installer.key
    signer=$(gpg --batch --status-fd 1 --verify "$archive.sig" "$archive" 2>/dev/null | awk '$2 == "VALIDSIG" { print $NF }') ||
        fail "$archive: not signed by its key"
    [ "$signer" = "$KEY_FINGERPRINT" ] || fail "$archive: signed by ${signer:-nobody}; expected $KEY_FINGERPRINT"
    tar -xf "$archive"
    apt-get update
    (cd aws-efa-installer && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify)
    rm -rf "$ROOT"/var/lib/apt/lists/*
}

main "$@"
