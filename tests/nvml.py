"""A stand-in for NVML: a module `pynvml` by which the processes of a machine without GPUs see some.

It is found before the real one by processes that begin in the folder that `folder_with_gpus` makes, as the preflight's
do on pods, and by those that have `environment` of it.
"""

import os
from pathlib import Path

from tests.pages import ROOT

MODULE = '''
"""Stands in for NVML, by tests/nvml.py."""
from types import SimpleNamespace

UUIDS = {uuids!r}
PARTS = {parts!r}
MODEL = {model!r}


class NVMLError(Exception):
    """As in pynvml."""


def nvmlInit():
    """Nothing is to be done."""


def nvmlShutdown():
    """Nothing is to be undone."""


def nvmlDeviceGetCount():
    return len(UUIDS)


def nvmlDeviceGetHandleByIndex(number):
    return UUIDS[number]


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetUUID(handle):
    return handle


def nvmlDeviceGetName(handle):
    return MODEL


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(free=80 << 30, total=80 << 30)


def nvmlDeviceGetMaxMigDeviceCount(handle):
    if not PARTS:
        raise NVMLError("Not Supported")
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, number):
    if number not in PARTS:
        raise NVMLError("Not Found")
    return f"MIG-{{handle}}-{{number}}"
'''


def uuid(number: int) -> str:
    """UUID of the GPU with this number."""
    return f"GPU-{number}a2b3c4d-0000-1111-2222-333344445555"


def folder_with_gpus(folder: Path, gpus: int, parts: tuple[int, ...] = (), model: str = "H100") -> Path:
    """Make a working folder whose processes see so many GPUs, and use this checkout's package.

    Args:
        parts: numbers of the MIG instances of each GPU that can be used; none where GPUs are not divided.
    """
    folder.mkdir()
    uuids = [uuid(number) for number in range(gpus)]
    (folder / "pynvml.py").write_text(MODULE.format(uuids=uuids, parts=parts, model=model))
    (folder / "zeropods").symlink_to(ROOT / "zeropods")
    return folder


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """This process's environment with the GPUs of such a folder, and further variables."""
    searched = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": searched, **variables}
