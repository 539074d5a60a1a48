"""What a rank imports: torch, transformers and DeepSpeed, without what they bring along and no run here uses.

Importing is most of the time that a small run takes, and pods on one machine share its cores for it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

UNUSED = ("datasets", "scipy", "sklearn")
"""Packages that transformers imports wherever they are installed, and that no training here calls."""
COMPILER = "torch._dynamo"


@contextlib.contextmanager
def quick_imports(argv: Sequence[str]) -> Iterator[None]:
    """Import what a run needs within this block, and at its end what else its flags ask for; in half of the time.

    Modules come by the thousand and none of them is garbage: the collector shall not look at them, then or later.
    """
    flags = {word.partition("=")[0] for word in argv}
    hidden = [name for name in UNUSED if name not in sys.modules]
    gc.disable()
    try:
        if "--compile" not in flags:
            DeferredCompiler()
        # The import system finds no module whose entry is None.
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        yield
        import_module("zeropods.train.run")
        if "--deepspeed" in flags:
            import_module("deepspeed")
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        gc.freeze()
        gc.enable()


class DeferredCompiler(ModuleType):
    """Takes the place of torch's compiler, until more of it is asked for than whether something is compiled.

    transformers imports the compiler for one of its modules, accelerate for a class, and torch's optimizers for a
    decorator. Loading it takes a rank two seconds and 40 MB, and most runs compile nothing.
    """

    def __init__(self) -> None:
        """Take the place."""
        import torch

        super().__init__(COMPILER)
        spec = find_spec(COMPILER)
        assert spec is not None and spec.submodule_search_locations is not None
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations
        self.graph_break = lambda: None
        self.eval_frame = SimpleNamespace(OptimizedModule=type("OptimizedModule", (), {}))
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        sys.modules[COMPILER] = torch._dynamo = self
        import_module(f"{COMPILER}._trace_wrapped_higher_order_op")
        sys.meta_path.insert(0, CompilerFinder(self))

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """The function itself, or a decorator that leaves a function as it is."""
        return function or (lambda each: each)

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        """What else the compiler has; it is loaded now."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """The compiler itself, which takes its place again."""
        if sys.modules[COMPILER] is self:
            del sys.modules[COMPILER]
        return import_module(COMPILER)


class CompilerFinder(MetaPathFinder, Loader):
    """Finds the modules of a deferred compiler: it is loaded first, and as a rule has loaded the module too."""

    def __init__(self, deferred: DeferredCompiler) -> None:
        self._deferred = deferred

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Where a module of the deferred compiler is; None for any other."""
        if path is not self._deferred.__path__:
            return None
        self._deferred.load()
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module as the compiler has loaded it."""
        return import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is loaded."""
