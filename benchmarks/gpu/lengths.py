"""Write the lengths of a prepared train split into a NumPy file: `python -m benchmarks.gpu.lengths SET FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from zeropods.errors import UserError, guarded
from zeropods.train.sampler import load_split


def main() -> None:
    """The file appears whole."""
    folder, out = map(Path, sys.argv[1:3])
    rows = load_split(folder, "train")
    if rows is None:
        raise UserError(f"{folder}: has no train split; prepare the data set again")
    temporary = out.with_suffix(".part.npy")
    np.save(temporary, rows.lengths())
    os.replace(temporary, out)


if __name__ == "__main__":
    sys.exit(guarded(main))
