"""Ports that are given to a server which listens only seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from zeropods.programs import LISTENED, free_port, is_free


def test_a_port_that_a_server_has_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("127.0.0.1", server.getsockname()[1])
        assert not is_free("", server.getsockname()[1])


def test_a_free_port_is_none_that_the_kernel_gives_to_others() -> None:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not file.exists():
        pytest.skip("not Linux")
    lowest = int(file.read_text().split()[0])
    if lowest <= LISTENED[-1]:
        pytest.skip(f"this kernel gives ports from {lowest} up")
    assert free_port("127.0.0.1") < lowest


def test_equal_seeds_do_not_give_equal_ports() -> None:
    ports = set()
    for _ in range(3):
        random.seed(1)
        ports.add(free_port("127.0.0.1"))
    assert len(ports) > 1
