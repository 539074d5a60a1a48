"""Export: source -> weights -> folder -> read back -> in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeropods import atomic
from zeropods.errors import UserError
from zeropods.export import DTYPES
from zeropods.export.source import Source, find_source
from zeropods.safe_weights import SUFFIX, has_weights


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported."""

    out: str
    source: str
    """The folder that the weights were taken from."""
    checkpoint: int
    """Its step."""
    consolidated: bool
    """Whether they were put together from ZeRO's shards."""
    parameters: int
    """Tied ones once."""
    bytes: int
    """Of the weight files."""
    dtype: str
    equals_model: bool | None
    """Whether they are those of the finished run's `model/`; None where that is not of the same step."""

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def export(
    run: Path,
    out: Path,
    *,
    checkpoint: int | None = None,
    dtype: str = "float32",
    progress: Callable[[int], object] = lambda count: None,
) -> Exported:
    """Make a model folder of a run's weights: safetensors, configuration, tokenizer, generation settings.

    It appears whole, after it was read back and loaded.

    Args:
        run: a run folder.
        out: the folder to make; it may exist if it is empty.
        checkpoint: the step to take; the finished run's own, or the newest one, if not given.
        dtype: of the exported floating-point numbers.
        progress: is told of each tensor written.

    Raises:
        UserError: nothing to export, `out` holds something, or the weights are not what they should be.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r}; expected {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists; choose a new folder, or an empty one")
    source = find_source(run, checkpoint)
    return _exported(source, out, dtype, progress)


def _exported(source: Source, out: Path, dtype: str, progress: Callable[[int], object]) -> Exported:
    import torch

    from zeropods.export.check import check_export
    from zeropods.export.weights import weights_of
    from zeropods.export.write import write_companions, write_weights
    from zeropods.train.disk_errors import said_in_one_line

    weights, kind = weights_of(source), getattr(torch, dtype)
    equals = _compared(source, weights)
    with atomic.new_folder(out) as built:
        with said_in_one_line(built.parent, str(out), "see to the disk, then export again"):
            write_weights(weights, built, kind, progress)
            write_companions(source.folder, built, dtype)
        parameters = check_export(weights, built, kind)
        size = sum(path.stat().st_size for path in built.glob(f"*{SUFFIX}"))
    return Exported(
        out=str(out),
        source=str(source.folder),
        checkpoint=source.step,
        consolidated=source.shards is not None,
        parameters=parameters,
        bytes=size,
        dtype=dtype,
        equals_model=equals,
    )


def _compared(source: Source, weights: Any) -> bool | None:
    """Compare with what training itself put together: the checkpoint's whole weights, the finished model."""
    from zeropods.export.check import difference
    from zeropods.export.weights import stored

    if source.shards is not None and has_weights(source.folder):
        different = difference(weights, stored(source.folder))
        if different is not None:
            raise UserError(f"{source.folder}: its shards and its *{SUFFIX} differ: {different}; take another one")
    if source.final is None:
        return True if source.folder.name == "model" else None
    different = difference(weights, stored(source.final))
    if different is not None and not source.asked:
        raise UserError(
            f"{source.final}: differs from {source.folder.name}: {different}; "
            f"one of them was changed: --checkpoint {source.step} exports the checkpoint"
        )
    return different is None
