"""Commands under an account without rights, where the tests run as root."""

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

ORDINARY, NUMBER = "ordinary-pod", "64321"
"""Not `nobody`: where systemd names accounts, sshd takes that one for locked."""


def is_possible() -> bool:
    """Whether this process may make a mount namespace and become another user."""
    tried = ["unshare", "--mount", "setpriv", f"--reuid={NUMBER}", "true"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def as_ordinary_user(folder: Path, project: Path, name: str, script: str) -> list[str]:
    """The command that runs a shell's script as this user, in a private view of the file system.

    There the account has a shell; /mnt/python is Python, which finds its packages, and /mnt/NAME the project.
    """
    passwd = folder / "passwd"
    passwd.write_text(f"root:x:0:0::/root:/bin/sh\n{ORDINARY}:x:{NUMBER}:{NUMBER}::/tmp:/bin/sh\n")
    prepared = f"""
        set -e
        mount --make-rprivate /
        mount --bind {passwd} /etc/passwd
        mount -t tmpfs tmpfs /mnt
        mkdir /mnt/python /mnt/packages {shlex.quote(f"/mnt/{name}")}
        mount --rbind {sys.base_prefix} /mnt/python
        mount --rbind {shlex.quote(str(project))} {shlex.quote(f"/mnt/{name}")}
        mount --rbind {sysconfig.get_path("purelib")} /mnt/packages
        # Its programs look for its libraries where it was built, which may be a folder of root's alone.
        if ! setpriv --reuid={NUMBER} --clear-groups test -r {sys.base_prefix}/lib; then
            mount -t tmpfs tmpfs {Path(sys.base_prefix).parents[-2]}
            mkdir -p {sys.base_prefix}
            mount --rbind /mnt/python {sys.base_prefix}
        fi
        export PYTHONPATH=/mnt/packages HOME=/tmp
        exec setpriv --reuid={NUMBER} --regid={NUMBER} --clear-groups sh -c {shlex.quote(script)}"""
    return ["unshare", "--mount", "sh", "-c", prepared]
