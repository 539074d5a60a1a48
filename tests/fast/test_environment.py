"""What a run ran on: versions without an installed package, the process's age, a GPU through NVML's real binding.

The library that the binding loads is a small one of our own, since a driver's needs a GPU.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zeropods import __version__
from zeropods.measure import environment

SOURCE = """
#include <string.h>

struct memory { unsigned version; unsigned long long total, reserved, free, used; };
struct rates { unsigned gpu, memory; };
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static int device;

int nvmlInitWithFlags(unsigned flags) { return OK; }
const char *nvmlErrorString(int status) { return "said by the test"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{ *handle = &device; return strcmp(uuid, "GPU-1234") ? NOT_FOUND : OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{ *handle = &device; return strcmp(bus, "00000000:3B:00.0") ? NOT_FOUND : OK; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory *found)
{
    if (handle != &device || found->version != (sizeof *found | 2u << 24)) return INVALID;
    found->used = 7; found->reserved = 11; return OK;
}
int nvmlDeviceGetUtilizationRates(void *handle, struct rates *found) { found->gpu = 87; found->memory = 12; return OK; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return NOT_SUPPORTED; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{ *millijoules = 1234567; return OK; }
"""
ASK = """
import json, sys
from zeropods.measure.memory import find_gpu
found = [find_gpu(names) for names in json.loads(sys.argv[1])]
print(json.dumps([None if gpu is None else gpu.read() | {"energy": gpu.energy_joules()} for gpu in found]))
"""
TOLD = {
    "device_used_bytes": 7,
    "utilization_percent": 87,
    "memory_utilization_percent": 12,
    "power_watts": None,
    "energy": 1234.567,
}


def ask(library: Path, *names: list[str]) -> list[object]:
    """What a process that finds such a library is told of GPUs, each with several names."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    command = [sys.executable, "-c", ASK, json.dumps(names)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)


def test_a_gpu_is_found_by_any_of_its_names_and_read_and_there_is_none_without_a_driver(tmp_path: Path) -> None:
    assert ask(tmp_path, ["GPU-1234"]) == [None]
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libnvidia-ml.so.1")]
    subprocess.run(made, input=SOURCE, text=True, check=True, timeout=60)
    found = ask(tmp_path, ["GPU-1234"], ["MIG-1234", "GPU-1234"], ["GPU-other", "00000000:3B:00.0"], ["GPU-other"])
    assert found == [TOLD, TOLD, TOLD, None]


def test_a_record_names_the_version_of_the_code_that_ran_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_torch(name: str) -> str:
        if name != "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.13.0"

    monkeypatch.setattr(environment, "version", only_torch)
    found = environment.versions()
    assert (found["zeropods"], found["torch"], found["deepspeed"]) == (__version__, "2.13.0", None)
