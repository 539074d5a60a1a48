"""`master_p.py` as its users call it: one line of a hostfile, or one line that says what is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zeropods.pods import this_pod
from zeropods.pods.hostfile import parse_hostfile

SCRIPT = Path(__file__).resolve().parents[2] / "master_p.py"


def master_p(*flags: str, **stated: str) -> subprocess.CompletedProcess[str]:
    """The script with only those of CML's variables that are stated."""
    kept = {name: value for name, value in os.environ.items() if name not in this_pod.ADDRESS_VARIABLES}
    argv = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(argv, env={**kept, **stated}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("stated", "address"),
    [
        ({"CDSW_IP_ADDRESS": "10.1.2.3", "CML_IP_ADDRESS": "10.9.9.9"}, "10.1.2.3"),
        ({"CDSW_IP_ADDRESS": "", "CML_IP_ADDRESS": "10.9.9.9"}, "10.9.9.9"),
        ({}, None),
    ],
    ids=["older variable", "newer variable", "outside of CML"],
)
def test_it_prints_one_line_of_a_hostfile(stated: dict[str, str], address: str | None) -> None:
    done = master_p(**stated)
    (host,) = parse_hostfile(done.stdout, "master_p.py")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert host.slots == this_pod.slots() >= 1
    if address is None:
        with socket.socket() as sock:
            sock.bind((host.address, 0))
    else:
        assert host.address == address


@pytest.mark.parametrize("stated", ["pod-1", "10.1.2.3\n", "::1"])
def test_an_address_that_is_none_is_one_line_with_its_variable(stated: str) -> None:
    done = master_p(CDSW_IP_ADDRESS=stated)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"zeropods: CDSW_IP_ADDRESS: {stated!r}; expected an IPv4 address, or unset it\n"


def test_an_unknown_flag_is_refused() -> None:
    done = master_p("--ip", "10.1.2.3")
    assert done.returncode == 2 and "unrecognized arguments" in done.stderr
