"""What every pod must have: what this machine has, and what a run is going to need."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zeropods.measure.environment import versions
from zeropods.pods.preflight.machine import digest

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What every pod must have."""

    project: Path
    """The folder that the run starts in, absolute."""
    versions: dict[str, str | None]
    """The master's."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """The master's SHA-256 of files that all pods must see the same."""
    master_port: int | None = None
    """Must be free on the first pod."""
    offload: bool | None = None
    """Whether the run needs CPU Adam; None where no run is planned yet."""
    cml: bool = False
    """Whether the pods are CML's."""
    disk_bytes: int = GIB
    """Free space without which the project folder is full."""
    gpu_free_fraction: float = 0.9
    """Of a GPU's memory; less is free where somebody else uses it."""

    @classmethod
    def of_this_machine(
        cls,
        project: Path,
        files: tuple[str, ...] = (),
        *,
        master_port: int | None = None,
        offload: bool | None = None,
        cml: bool = False,
    ) -> Expectation:
        """That the pods be like this machine.

        Args:
            files: such as the training script, relative to the project or absolute.
        """
        folder = project.absolute()
        digests = {name: digest(folder / name) for name in files}
        return cls(
            project=folder,
            versions=versions(),
            digests=digests,
            master_port=master_port,
            offload=offload,
            cml=cml,
        )
