"""The log of a run: `train.log` in its folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from zeropods.train import processes


@contextlib.contextmanager
def train_log(folder: Path) -> Iterator[None]:
    """Lines of this package and warnings of others go to `train.log` of the run; rank 0 writes it."""
    if processes.rank() != 0:
        yield
        return
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("zeropods")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
