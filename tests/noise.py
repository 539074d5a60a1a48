"""What the cells of an executed notebook show of other libraries' words: nothing."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

BARS = "answer|check|perplexity|pods|prepare|sweep|train"
OWN_LINES = (
    rf"({BARS}): +(\d+%\|.*|\d+ \w+ \[.*)",
    # A line of a sweep or of a series of runs.
    r"run \d+ of \d+: .* (begins|ok after .*)",
    r"\d+ of \d+ runs have a result already",
    r"runs of one process train without GPUs too, .*",
    r"\d+ processes for \d+ visible GPUs?: these runs train without GPUs",
    # What is said of a cluster, and of a run by its folder: no warning, which names a line of a file.
    r"cluster [\w-]+: .*",
    r"(?!\S+\.py:\d)[.~]?/\S+: .*",
)
"""Patterns of the lines that the project writes to stderr in a notebook."""
NOISE = re.compile(r"\[INFO\]|\[WARNING\]|Warning: |accumulation steps mismatch|missing keys")
"""Matches what other libraries write to stdout, among what a cell has printed."""


def noise(outputs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of these outputs of cells that another library has written, on whichever stream."""
    found = []
    for output in outputs:
        if output["output_type"] != "stream":
            continue
        for line in re.split(r"[\r\n]+", "".join(output["text"])):
            if output["name"] == "stdout":
                is_noise = NOISE.search(line) is not None
            else:
                is_noise = bool(line.strip()) and not any(re.fullmatch(own, line.strip()) for own in OWN_LINES)
            if is_noise:
                found.append(line)
    return found
