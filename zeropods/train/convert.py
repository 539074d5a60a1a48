"""A process that makes the universal form of ZeRO's shards: `python -m zeropods.train.convert SHARDS OUT`.

DeepSpeed's own converter, told that it may make tensors and plain values only of what it reads. A process of its own
gives back the memory that it took, and can be ended.
"""

from __future__ import annotations

import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path

from zeropods.errors import UserError, guarded
from zeropods.files import first_line, foreign_object, plain_values_only, said_in_one_line


def main() -> None:
    """Convert; what is wrong with the shards is one line on stderr."""
    shards, out = sys.argv[1:]
    from deepspeed.checkpoint import ds_to_universal

    wanted = Namespace(
        input_folder=shards,
        output_folder=out,
        # Worker processes would each hold a rank's states.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with said_in_one_line(Path(out).parent, Path(out).name, "free or repair the disk"), plain_values_only():
            ds_to_universal.main(wanted)
    except pickle.UnpicklingError as error:
        raise UserError(f"{shards}: holds {foreign_object(error)}, which is no plain value; it is not opened") from None
    except (ValueError, KeyError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise UserError(f"{shards}: cannot be converted ({first_line(error)}); resume on as many ranks") from None


if __name__ == "__main__":
    status = guarded(main)
    sys.stderr.flush()
    # Libraries' threads need not be waited for.
    os._exit(status)
