"""`zeropods sweep` with pdsh itself in the place of DeepSpeed's launcher, as `over_pdsh` has it for a launch.

python -m tests.full.sweep_over_pdsh MATRIX.yaml OUT [CLUSTER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.full.over_pdsh import pdsh_argv
from zeropods import pods
from zeropods.errors import guarded
from zeropods.sweep.matrix import read_matrix
from zeropods.sweep.run import run_sweep


def main() -> int:
    matrix, out, *names = sys.argv[1:]
    cluster = pods.find(names[0]) if names else None
    sweep = run_sweep(read_matrix(Path(matrix)), out, cluster, argv=pdsh_argv)
    return int(not sweep.is_measured)


if __name__ == "__main__":
    sys.exit(guarded(main))
