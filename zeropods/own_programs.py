"""The programs of this Python's own environment, found before others of the same name."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def own_programs_first(path: str | None) -> str:
    """A PATH with this interpreter's folder in front.

    DeepSpeed calls `ninja`, and compiles its operations anew (half a minute and more) whenever it meets another
    version than the one before.
    """
    folders = [str(Path(sys.executable).parent), *(path or os.defpath).split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, folders)))
