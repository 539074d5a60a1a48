"""The programs that a cluster cannot do without, asked for before anything is started."""

from __future__ import annotations

import os
import shutil

from zeropods.errors import UserError

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}
"""Debian's and Ubuntu's."""
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where sshd lies, and which the PATH of an ordinary user often lacks."""


def require_programs() -> None:
    """`UserError` that names all missing programs and the packages that bring them."""
    missing = [name for name in PACKAGES if _find(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise UserError(f"{', '.join(missing)}: not found on PATH; apt-get install {packages}")


def _find(name: str) -> str | None:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(name, path=os.pathsep.join([path, *SYSTEM_FOLDERS]) if name == "sshd" else path)
