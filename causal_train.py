"""Fine-tune a causal language model on questions or text: one process, several, or a launcher's.

    python causal_train.py --task lm --data DIR --model_name_or_path gpt-tiny --init random --outputdir runs/text
    python causal_train.py --task squad --data DIR --subset 500 --outputdir runs/workshop
    deepspeed causal_train.py --deepspeed dsconfig/causal_zero3_offload.json ...

The run folder (`--outputdir`) holds everything of the run; `record.json` is written last.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zeropods.errors import guarded
from zeropods.train import run_script

if TYPE_CHECKING:
    from zeropods.train.causal import Causal


def main() -> int:
    """Train; the exit status says whether all went well."""
    return run_script(_task)


def _task() -> type[Causal]:
    from zeropods.train.causal import Causal

    return Causal


if __name__ == "__main__":
    sys.exit(guarded(main))
