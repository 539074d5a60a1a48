r"""Fine-tune a causal language model on questions or text: in one process, in several, or under a
launcher.

    python causal_train.py --task lm --data DIR --model_name_or_path gpt-tiny \
        --init random --outputdir runs/text
    python causal_train.py --task squad --data DIR --subset 500 --outputdir runs/workshop
    deepspeed causal_train.py --deepspeed dsconfig/causal_zero3_offload.json ...

The run folder (`--outputdir`) holds all files of the run; `record.json` is written last.
"""

from __future__ import annotations

import sys
from functools import partial

from zeropods.errors import guarded
from zeropods.report.to_mlflow import report_end
from zeropods.train import run_script

if __name__ == "__main__":
    sys.exit(guarded(partial(run_script, report_end)))
