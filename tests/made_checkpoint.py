"""Checkpoints made by hand, as three ranks would write them, for tests of what saves and verifies them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeropods.train.checkpoints import Origin, complete, digest, hashed, make_room, names_in, share

MEMORY = Path("/dev/shm")


def an_origin(**values: Any) -> Origin:
    settings = digest({"max_steps": 30})
    model: dict[str, int | str | bool | None] = {"d_model": 64, "precision": "fp32", "deepspeed": "zero1"}
    return Origin(**{"run_id": "r1", "settings": settings, "model": model, "world_size": 3, **values})


def content_of(step: int, save: str = "first") -> dict[str, bytes]:
    """The files of a step: small, and different in each save."""
    named = ["trainer_state.json", "model.safetensors", "latest", *(f"rng_state_{k}.pth" for k in range(3))]
    shards = [f"global_step{step}/zero_pp_rank_{k}_mp_rank_00_optim_states.pt" for k in range(3)]
    return {name: f"{name} of step {step}, {save} save".encode() * 3 for name in [*named, *shards]}


def save(folder: Path, step: int, *, save: str = "first", origin: Origin | None = None) -> Path:
    """Save a step by the protocol, one rank after the other."""
    place = make_room(folder, step)
    for name, content in content_of(step, save).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    files = {}
    for rank in range(3):
        files.update(hashed(place, share(names_in(place), rank, 3)))
    complete(folder, step, origin or an_origin(), files)
    return place


def read(checkpoint: Path) -> dict[str, bytes]:
    """All files of a checkpoint, without its manifest."""
    return {name: (checkpoint / name).read_bytes() for name in names_in(checkpoint)}


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where the system has one: forcing a file down costs nothing there."""
    folder = Path(tempfile.mkdtemp(prefix="zeropods-test-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
