"""The restart policy of a run over pods: when it restarts by itself on the pods that are left, and
with what."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError
from zeropods.launch.command import AGENTS, Launch, plan_launch
from zeropods.launch.outcome import UnopenedError, with_pod
from zeropods.launch.script_call import ScriptCall, train_arguments
from zeropods.measure.record import Record
from zeropods.train.checkpoints import MANIFEST
from zeropods.train.flags import PASSES, ROWS, Batch, batch_on

if TYPE_CHECKING:
    from zeropods.pods.cluster import Cluster

JOURNAL = "restarts.json"
"""File in the run folder: for the last launch that restarted by itself, why its attempts ended and
how it went on."""


def check_restarts(planned: Launch, restarts: int, min_pods: int | None) -> None:
    """Refuse more `min_pods` than the launch has pods, and `restarts` or `min_pods` for a script
    whose batch is not known; `UserError` says which."""
    if min_pods is not None and min_pods > len(planned.hosts):
        raise UserError(
            f"--min-pods {min_pods}: the run starts on only {len(planned.hosts)}; give no more"
        )
    if (restarts or min_pods) and batch_of(planned) is None:
        flag = f"--restarts {restarts}" if restarts else f"--min-pods {min_pods}"
        raise UserError(
            f"{flag}: {planned.script.name} is not one of our scripts; "
            f"give --{ROWS} and --{PASSES}, so that a restart can keep the batch size"
        )


def batch_of(launch: Launch) -> Batch | None:
    """The batch of each rank by the script's flags; None for a script that is not ours and is not
    given both the rows of a pass and the passes of a step."""
    flags = launch.call.values
    rows = flags.get(ROWS)
    passes = flags.get(PASSES)
    if isinstance(rows, int) and isinstance(passes, int) and min(rows, passes) > 0:
        return Batch(rows, passes)
    return None


def calls_for_another(outcome: Record | UnopenedError) -> bool:
    """Whether another attempt makes sense after an attempt with this outcome: always if a pod was
    lost; of other failures, only if something outside of the script ended the ranks, since an error
    of the script would only occur again. Never after `oom`, `timeout` or Ctrl-C."""
    if outcome.status == "pod_lost":
        return True
    if outcome.status != "failed" or isinstance(outcome, UnopenedError):
        return False
    # A rank leaves a measurement after every error that Python can report, so one without was
    # killed.
    if len(outcome.ranks) < outcome.world_size:
        return True
    # If no rank says that it failed, the launcher was ended.
    return all(rank.status not in ("failed", "oom") for rank in outcome.ranks)


def saved_checkpoints(folder: Path) -> frozenset[tuple[str, int]]:
    """The complete checkpoints of a run folder: for each the path of its manifest, and when that
    was written, in nanoseconds since 1970, so that a checkpoint that is saved anew is another."""
    saved = set()
    for path in (folder / "checkpoints").glob(f"checkpoint-*/{MANIFEST}"):
        # A rank that is still alive may delete its oldest checkpoint meanwhile.
        with suppress(OSError):
            saved.add((str(path), path.stat().st_mtime_ns))
    return frozenset(saved)


def next_attempt(
    original: Launch, left: Cluster, min_pods: int, *, opened: bool, has_saved: bool
) -> Launch | str:
    """The launch on the most pods that keep the effective batch size, or the reason, as text, why
    there is none.

    Args:
        original: the launch that the user asked for.
        left: the cluster with the pods that still answer.
        min_pods: fewest pods for the launch.
        opened: whether an attempt of this launch has opened the run, so that the folder is its own.
        has_saved: whether an attempt of this launch has saved a checkpoint.
    """
    pods = min(len(left.pods), len(original.hosts))
    if pods < min_pods:
        return f"too few pods are left ({len(left.pods)}, --min-pods {min_pods})"
    batch = batch_of(original)
    # `check_restarts` has refused launches without a known batch.
    assert batch is not None
    effective = batch.rows * batch.passes * original.world_size
    resume = original.call.flag_texts.get("resume", "auto")
    # With `never`, opening the run has put older checkpoints aside. A checkpoint that is named is
    # needed again until this launch has saved one. After that, the newest checkpoint is right.
    resume_is_done = resume != "auto" and opened and (resume == "never" or has_saved)
    numbers = range(pods, min_pods - 1, -1)
    for number in numbers:
        slots = sum(pod.slots for pod in left.pods[:number])
        new_batch = batch_on(slots, effective, batch.rows)
        if new_batch is None:
            continue
        changes = {}
        for name, value in new_batch.flags.items():
            if value != batch.flags[name]:
                changes[name] = str(value)
        if resume_is_done:
            changes["resume"] = "auto"
        # A flag that comes twice counts with its last value.
        call = ScriptCall.of(original.script, [*original.arguments, *train_arguments(**changes)])
        launcher = _launcher_again(original)
        try:
            planned = plan_launch(
                left, call, pods=number, export=original.export, launcher=launcher
            )
        except UserError as error:
            # On fewer pods the error would be the same.
            return str(error)
        return replace(planned, original=original, changed_flags=changes)
    fewer = f", nor among fewer (at least {min_pods})" if len(numbers) > 1 else ""
    why = f"an effective batch of {effective} rows cannot be divided evenly among {pods} pods"
    return f"{why}{fewer}"


def _launcher_again(original: Launch) -> str | None:
    """The launcher that a restart has to take; None where it is chosen anew."""
    # Agents reach every pod, and the arguments or variables may be such as pdsh cannot pass on.
    if original.launcher == AGENTS:
        return AGENTS
    # Over pdsh only if the user asked for it: a pod that is new may have no sshd.
    return original.requested_launcher


def journal_entry(
    original: Launch, following: Launch, remaining: Cluster, **ended: object
) -> dict[str, object]:
    """What ended an attempt, and how the run goes on, as an entry of `JOURNAL`.

    Args:
        following: the launch with which the run goes on, on the first of the `remaining` pods.
        ended: `status`, `pod`, `rank`, `reason`, the `steps` that were done, and
            `found_unix_seconds`, when the supervisor found that the attempt was over.

    Returns:
        `ended`, and the names of the `pods`; `unused`, the names of pods that answer but are left
        out, so that the batch divides; and `flags`, the script's flags that differ from what was
        asked for.
    """
    names = [pod.name for pod in remaining.pods]
    # `next_attempt` takes the first pods; those beyond the number asked for were never to be used.
    used = len(following.hosts)
    return {
        **ended,
        "pods": names[:used],
        "unused": names[used : len(original.hosts)],
        "flags": following.changed_flags,
    }


def restart_line(entry: Mapping[str, Any], how: str) -> str:
    """An entry of the journal as text for a person.

    Args:
        how: what is done now, such as `restart 1 of 2`.
    """
    why = with_pod(entry["pod"], entry["reason"] or "")
    line = f"{entry['status']}: {why}; {how} on {', '.join(entry['pods'])}"
    if entry["unused"]:
        line += f", without {', '.join(entry['unused'])}"
    if entry["flags"]:
        line += " with"
    for name, value in entry["flags"].items():
        line += f" --{name} {value}"
    return line
