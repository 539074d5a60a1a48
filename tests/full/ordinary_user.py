"""Another user than root, in a private view of the file system in which that user finds Python and its packages."""

import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PYTHON, PACKAGES = "/mnt/python", "/mnt/site-packages"
"""Where that view has Python, and the packages of this environment. By that folder's name dill, by which datasets
hashes functions, knows modules into which it need not look."""


def are_possible(number: str) -> bool:
    """Whether this process may make a mount namespace and become the user with this number."""
    tried = ["unshare", "--mount", "setpriv", f"--reuid={number}", "true"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def as_user(number: str, *command: str) -> list[str]:
    """The command as this user runs it."""
    return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", *command]


def view(folder: Path, account: str, number: str, home: str, places: Mapping[str, Path]) -> str:
    """Lines for a shell of root in a mount namespace of its own, which make the view.

    Args:
        folder: of a test, for the file with the accounts.
        places: what the view has below /mnt, by the name there.
    """
    passwd = folder / "passwd"
    passwd.write_text(f"root:x:0:0::/root:/bin/sh\n{account}:x:{number}:{number}::{home}:/bin/sh\n")
    bound = [_bound(PYTHON, sys.base_prefix), _bound(PACKAGES, sysconfig.get_path("purelib"))]
    for name, source in places.items():
        bound.append(_bound(f"/mnt/{name}", source))
    lines = "\n".join(bound)
    is_readable = shlex.join(as_user(number, "test", "-r", f"{sys.base_prefix}/lib"))
    return f"""
        set -e
        mount --make-rprivate /
        mount --bind {shlex.quote(str(passwd))} /etc/passwd
        mount -t tmpfs tmpfs /mnt
        {lines}
        # Its programs look for its libraries where it was built, which may be a folder of root's alone.
        if ! {is_readable}; then
            mount -t tmpfs tmpfs {Path(sys.base_prefix).parents[-2]}
            {_bound(sys.base_prefix, PYTHON)}
        fi
        """


def _bound(place: str, source: object) -> str:
    """The line that makes a folder and binds another one there."""
    return f"mkdir -p {shlex.quote(place)}; mount --rbind {shlex.quote(str(source))} {shlex.quote(place)}"
