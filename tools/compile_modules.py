"""Import what runs, notebooks, pages and tests import, so that Python keeps the byte code of it.

    .venv/bin/python tools/compile_modules.py

These are a tenth of all modules that are installed. Python compiles the others when they are first
imported, where it may write.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = "zeropods"
MODULES = (
    "nbclient",
    "nbconvert",
    "ipykernel.kernelapp",
    "jupyterlab.labapp",
    "matplotlib.pyplot",
    "gradio",
    "datasets",
    "evaluate",
    "scipy.stats",
    "torch.utils.tensorboard",
    "transformers.models.bloom.modeling_bloom",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "pytest",
    "hypothesis",
)
"""Modules of other packages that this project's own modules import late, or not at all."""


def main() -> None:
    """Import them; one that cannot be imported is left to whoever needs it."""
    # The environment may forbid to write byte code, which is what this program is for.
    sys.dont_write_bytecode = False
    # In a clone that is not installed, Python looks for modules in this file's own folder only.
    sys.path.insert(0, str(PROJECT))
    for name in (*own_modules(), *MODULES):
        with suppress(ImportError):
            import_module(name)


def own_modules() -> list[str]:
    """Names of the modules of this project's package, but for those that run when imported."""
    names = []
    for path in sorted((PROJECT / PACKAGE).rglob("*.py")):
        module = path.relative_to(PROJECT).with_suffix("")
        if module.name != "__main__":
            names.append(".".join(module.parts).removesuffix(".__init__"))
    return names


if __name__ == "__main__":
    main()
