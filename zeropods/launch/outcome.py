"""What is recorded of a supervised run: the ranks' own word, or what its supervisor saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropods.launch.output import Output
from zeropods.launch.verdict import Verdict
from zeropods.measure.records import compose_record, first_failure, read_json, write_record
from zeropods.measure.run_folder import locked
from zeropods.pods.hostfile import Host

UNSAID = "it was killed, or ended without saying why"


def record_run(
    folder: Path, verdict: Verdict, output: Output, hosts: tuple[Host, ...], names: dict[str, str]
) -> dict[str, Any]:
    """Write `record.json` of a run whose ranks have ended, and return it.

    Args:
        hosts: where the ranks ran, in their order.
        names: pods' names by address.
    """
    pods = [names.get(host.address, host.address) for host in hosts for _ in range(host.slots)]
    with locked(folder):
        final = verdict if verdict.status == "pod_lost" else _of_ranks(_measured(folder), verdict, pods)
        lines = [] if final.status is None else output.tail(final.pod) or output.tail()
        record = compose_record(folder, status=final.status, reason=final.reason, pod=final.pod, last_lines=lines)
        write_record(folder, record)
    return record


def _of_ranks(measured: list[dict[str, Any]], verdict: Verdict, pods: list[str]) -> Verdict:
    """The verdict by what the ranks measured; without a status where all of them ended well.

    Where one pod lost its ranks first, what they say is the cause, and the errors of others follow from it.
    """
    found = {rank["rank"] for rank in measured}
    missing = [rank for rank in range(len(pods)) if rank not in found and verdict.pod in (None, pods[rank])]
    failed = first_failure([rank for rank in measured if verdict.pod in (None, pods[rank["rank"]])])
    own = failed is not None and failed["status"] != "interrupted"
    if verdict.status is not None and not own:
        return verdict if failed or missing else Verdict()
    if missing and not own:
        reason = f"rank {missing[0]} left no measurement: {verdict.reason or UNSAID}"
        return Verdict("failed", reason, pods[missing[0]])
    if failed is not None:
        return Verdict(failed["status"], f"rank {failed['rank']}: {failed['reason']}", pods[failed["rank"]])
    return Verdict()


def _measured(folder: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in (folder / "ranks").glob("*.json")]
