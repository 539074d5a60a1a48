"""Fine-tune a causal language model on questions or text: one process, several, or a launcher's.

    python causal_train.py --task lm --data DIR --model_name_or_path gpt-tiny --init random --outputdir runs/text
    python causal_train.py --task squad --data DIR --subset 500 --outputdir runs/workshop
    deepspeed causal_train.py --deepspeed dsconfig/causal_zero3_offload.json ...

The run folder (`--outputdir`) holds everything of the run; `record.json` is written last.
"""

from __future__ import annotations

import os
import sys

from zeropods.errors import guarded
from zeropods.extension_cache import use_own_cache
from zeropods.own_programs import own_programs_first
from zeropods.threads import wait_passively


def main() -> int:
    """Parse the flags, run, and say nothing more; an error that all ranks share is said by one of them."""
    wait_passively()
    os.environ["PATH"] = own_programs_first(os.environ.get("PATH"))
    use_own_cache()
    from zeropods.measure.environment import process_age_seconds
    from zeropods.train.causal_arguments import parse_arguments
    from zeropods.train.processes import SharedError
    from zeropods.train.run import fine_tune

    try:
        fine_tune(parse_arguments(sys.argv[1:]), sys.argv, process_age_seconds())
    except SharedError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
