"""Key pairs of a cluster, made by ssh-keygen and shown to nobody."""

from __future__ import annotations

import subprocess
from pathlib import Path

from zeropods.errors import UserError

KEYGEN_SECONDS = 30.0


def make_key(path: Path, comment: str) -> str:
    """Write a new ed25519 key without passphrase to `path` (mode 600), and its public half to `path`.pub.

    Args:
        comment: ends the public file's line; says whose key it is.

    Returns:
        The public key without its comment: `ssh-ed25519 AAAA...`.

    Raises:
        UserError: ssh-keygen is missing or fails, or `path` exists: a key is never overwritten.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: exists; a key is never overwritten: remove it, or choose another name")
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=KEYGEN_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError("ssh-keygen: not found; install it (Debian: apt-get install openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"ssh-keygen: not done after {KEYGEN_SECONDS:.0f} s; is {path.parent} reachable?") from None
    if done.returncode != 0:
        said = " ".join((done.stderr + done.stdout).decode(errors="replace").split())
        raise UserError(f"{path}: ssh-keygen failed: {said or done.returncode}; is the folder there and writable?")
    return public_key(path)


def public_key(path: Path) -> str:
    """The public half of the key at `path`, without its comment."""
    return " ".join(path.with_name(f"{path.name}.pub").read_text(encoding="utf-8").split()[:2])
