r"""Fine-tune T5 on text-to-SQL: in one process, in several, or under the deepspeed launcher.

    python textsql_train.py --model_id t5-tiny --init random --dataset_path DIR \
        --outputdir runs/tiny
    python textsql_train.py --model_id google-t5/t5-small --dataset_path DIR --outputdir runs/small
    deepspeed textsql_train.py --deepspeed dsconfig/zero1.json ...

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
