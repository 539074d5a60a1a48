"""What the ranks of a run have written into its folder since a launch began."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropods.errors import UserError
from zeropods.measure.records import read_json
from zeropods.measure.run_folder import CONFIG


class Ranks:
    """The ranks of one launch, by what they measured."""

    def __init__(self, folder: Path, pods: Sequence[str]) -> None:
        """`pods`: the name of each rank's pod, in the order of ranks."""
        self.pods = tuple(pods)
        self.folder = folder
        self.before = self.stamp()
        """What the folder said when the launch began."""

    def have_opened_the_run(self) -> bool:
        """Whether rank 0 has begun an attempt: what lies in the folder is this launch's."""
        return self.stamp() != self.before

    def have_all_measured(self) -> bool:
        """Whether every rank has written its last word."""
        return self.have_opened_the_run() and len(list(self._files())) == len(self.pods)

    def measured(self) -> list[dict[str, Any]]:
        """What each rank measured; a file that is damaged counts as none."""
        found = []
        for path in self._files() if self.have_opened_the_run() else ():
            try:
                found.append(read_json(path))
            except UserError:
                continue
        return [rank for rank in found if rank.get("rank") in range(len(self.pods))]

    def done(self) -> frozenset[str]:
        """Pods whose ranks have all ended well."""
        well = {rank["rank"] for rank in self.measured() if rank["status"] == "ok"}
        return frozenset(self.pods) - {pod for rank, pod in enumerate(self.pods) if rank not in well}

    def _files(self) -> list[Path]:
        return [path for path in (self.folder / "ranks").glob("*.json") if path.stem.isdigit()]

    def stamp(self) -> int | None:
        """What changes when the ranks open the run."""
        path = self.folder / CONFIG
        return path.stat().st_mtime_ns if path.is_file() else None
