"""What every rank finds in its environment, and the file that takes it there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from zeropods import atomic
from zeropods.errors import UserError

RUN = "ZEROPODS_RUN"
"""Marks every process of a run: by it the agents find and end them. Its value is the run's lease."""
FORWARDED = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "HF_TOKEN_PATH",
    "TORCH_EXTENSIONS_DIR",
    "OMP_WAIT_POLICY",
)
"""Settings that ranks need as the user has them here; DeepSpeed itself forwards PYTHON*, NCCL* and a few more."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
UNSAFE = re.compile(r"[\"'`$\\\n\r\0%]|[\ud800-\udfff]|^\s|\s$")
"""What a remote shell, pdsh or DeepSpeed would read as something else; and what is not UTF-8."""
FORWARDED_BY_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of names that DeepSpeed's launcher exports unasked (deepspeed/launcher/runner.py)."""
OURS = "ZEROPODS_"


def exported_variables(
    names: Iterable[str], fixed: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for every rank: `fixed` ones, those asked for by name, and FORWARDED ones that are set.

    They end up on command lines, so a name that sounds like a secret is refused, as is a value that
    does not pass a shell unchanged.
    """
    here = os.environ if environment is None else environment
    for name in names:
        if name.startswith(OURS):
            raise UserError(f"--export {name}: is set by zeropods itself; leave it out")
        if name not in here:
            raise UserError(f"--export {name}: not set here; give the name of a variable that is set")
    asked = {name: here[name] for name in (*FORWARDED, *names) if name in here}
    variables = {**asked, **fixed}
    for name, value in variables.items():
        _check(name, value)
    return variables


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without what it would put on command lines and must not.

    `UserError` names a variable that DeepSpeed forwards and whose value no remote shell leaves as it is.
    """
    kept = {}
    for name, value in environment.items():
        forwarded = name.startswith(FORWARDED_BY_DEEPSPEED)
        if forwarded and _is_secret(name):
            continue
        if forwarded and UNSAFE.search(value):
            raise UserError(f"{name}: DeepSpeed forwards it, and its value does not pass a remote shell; unset it")
        kept[name] = value
    return kept


def write_environment(path: Path, variables: Mapping[str, str]) -> None:
    """Write DeepSpeed's environment file: `NAME=VALUE` lines, no blank and no comment (they would raise)."""
    atomic.write_text(path, "".join(f"{name}={value}\n" for name, value in variables.items()))


def _check(name: str, value: str) -> None:
    if not NAME.fullmatch(name):
        raise UserError(f"--export {name!r}: no name of an environment variable; expected letters, digits and _")
    if _is_secret(name):
        raise UserError(
            f"--export {name}: sounds like a secret, and would be seen on command lines; "
            "put it into a file that the pods see, and export the file's path"
        )
    unsafe = UNSAFE.search(value)
    if unsafe:
        raise UserError(f"--export {name}: {unsafe[0]!r} in its value does not pass a remote shell; put it into a file")


def _is_secret(name: str) -> bool:
    return SECRET.search(name) is not None and not name.endswith(("_PATH", "_FILE"))
