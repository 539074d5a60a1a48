"""A machine without ssh, sshd and pdsh, as far as PATH says, and clusters there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zeropods import pods
from zeropods.cli import main
from zeropods.pods.cluster import Cluster
from zeropods.programs import SYSTEM_FOLDERS

LACKING = ("ssh", "sshd", "pdsh", "scp", "sftp")
"""Beginnings of the names of the programs that are not there."""


def path_without_ssh(folder: Path) -> str:
    """A value of PATH with a folder of links to all programs but those of ssh and pdsh; it is made."""
    folder.mkdir(exist_ok=True)
    for place in os.environ["PATH"].split(os.pathsep):
        if place in SYSTEM_FOLDERS or not Path(place).is_dir():
            continue
        for program in Path(place).iterdir():
            link = folder / program.name
            if not program.name.startswith(LACKING) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@contextmanager
def without_ssh(folder: Path) -> Iterator[None]:
    """Take ssh and pdsh from PATH in this block."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PATH", path_without_ssh(folder))
        yield


@contextmanager
def cluster_without_ssh(folder: Path, count: int, name: str) -> Iterator[Cluster]:
    """A cluster of local pods on such a machine."""
    with without_ssh(folder):
        up = pods.up(count, backend="local", name=name)
        try:
            yield up
        finally:
            assert main(["pods", "down", "--name", name]) == 0
