"""What a run asks of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from zeropods.train.checkpoints import CheckpointManifest
from zeropods.train.deepspeed_config import Config
from zeropods.train.flags import RunArguments


class Engine:
    """What holds the model and its optimizer during a run, and steps them.

    transformers' trainer drives every engine alike; what differs from one to another is asked here.
    The answers of this class are those of an engine without a configuration of its own, whose ranks
    hold plain tensors and whose checkpoints any number of ranks can load.
    """

    configuration: Config | None = None
    """The DeepSpeed configuration in effect, once the call has been checked; None for another
    engine."""
    is_divided_on_disk: ClassVar[bool] = False
    """Whether ranks save shards, so that another number of ranks can load a checkpoint only in its
    universal form, which `make_universal` makes."""

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        """The flags of the call."""

    # Checks, and what identifies a run.

    def check(self, ranks: int) -> None:
        """Read what the flags name for this engine, before processes connect.

        Args:
            ranks: number of processes of the run.

        Raises:
            UserError: what the flags name is missing or wrong, contradicts other flags, or cannot
                run here.
        """

    def check_steps(self, ranks: int, steps: int) -> None:
        """Check again, now that the data are known, and with them the run's optimizer steps.

        Raises:
            UserError: as `check` does.
        """

    def check_compiled(self) -> None:
        """Refuse `--compile` where this engine cannot run what it compiles."""

    def template_for_any_batch(self) -> Config | None:
        """The DeepSpeed configuration as it was read, but for the keys that give the batch.

        It must be equal for two calls to mean the same run. None for another engine.
        """
        return None

    @property
    def warmup_steps(self) -> int:
        """Number of steps at the beginning that rates leave out, since they are slow."""
        return 1

    # The beginning of a run, in this order.

    def prepare_process(self) -> None:
        """Prepare this process, before transformers' arguments are made."""

    def settings(self, precision: str) -> dict[str, object]:
        """Arguments of `TrainingArguments` for this engine.

        Args:
            precision: `fp32`, `bf16` or `fp16`.
        """
        return {}

    def connect(self) -> None:
        """Connect the processes where transformers' arguments have not done so."""

    def number_of_parameters(self, model: nn.Module) -> int:
        """Number of a model's parameters on all ranks together; tied ones count once."""
        return sum(parameter.numel() for parameter in model.parameters())

    def prepare_model(self, model: nn.Module, precision: str) -> None:
        """Change a model that was loaded in FP32, in place, into what this engine trains."""

    def optimizer(self, precision: str) -> tuple[type[Optimizer], dict[str, object]] | None:
        """The optimizer's class and its arguments, besides weight decay, which comes with the
        parameter groups; None where the engine brings an optimizer, or transformers does."""
        return None

    # Saving and loading. `wrapped` is the model as the engine has wrapped it.

    def weights_to_save(
        self, model: nn.Module, optimizer: object, *, is_writer: bool
    ) -> dict[str, Tensor] | None:
        """The whole weights in FP32, by name; every rank takes part.

        Args:
            optimizer: the trainer's, or None where nothing was trained.
            is_writer: whether this rank saves them; for another one the result may be empty.

        Returns:
            None where the model itself holds its whole weights in FP32.
        """
        return None

    def load_masters(self, model: nn.Module, optimizer: object, checkpoint: Path) -> None:
        """Load a checkpoint's weights into the optimizer's masters, where loading the model alone
        leaves the masters as they were."""

    def make_universal(self, place: Path, checkpoint: Path, manifest: CheckpointManifest) -> None:
        """Make the form of a checkpoint that any number of ranks can load, on one rank.

        Args:
            place: the folder to make; what is there is replaced.
            checkpoint: a verified checkpoint.
            manifest: its manifest.

        Raises:
            UserError: it cannot be made.
        """
        raise NotImplementedError

    def expect_universal(self, accelerator: object) -> None:
        """Let a model that accelerate is about to wrap load a universal checkpoint."""

    def loading_universal(self, wrapped: object) -> AbstractContextManager[None]:
        """Let a wrapped model load a universal checkpoint within the block."""
        return nullcontext()

    def correct_universal(self, wrapped: object) -> None:
        """Correct what a wrapped model has loaded from a universal checkpoint."""

    # The moment at which the meter counts, and what it counts: tensors that this rank holds, among
    # which there may be None.

    def call_before_step(self, wrapped: object, act: Callable[[], None]) -> None:
        """Call `act` once, between the reduction of the gradients and the optimizer's next step,
        where the trainer's callback for that comes too late."""

    def parameters(self, model: nn.Module) -> Iterator[object]:
        """What this rank holds of the parameters."""
        for parameter in model.parameters():
            yield parameter.data

    def gradients(self, model: nn.Module, optimizer: object) -> Iterator[object]:
        """What this rank holds of the parameters' gradients, just before the optimizer's step."""
        for parameter in model.parameters():
            yield parameter.grad

    def updated_weights(self, optimizer: object) -> list[Tensor]:
        """The weights on this rank that the optimizer updates: the masters where there are any."""
        return list(held_tensors(optimizer, ["param_groups"]))

    def optimizer_states(self, optimizer: object) -> Iterator[object]:
        """What this rank holds of the optimizer's states and of the weights that it updates."""
        return held_tensors(optimizer, ["param_groups", "state"])


def held_tensors(optimizer: object, attributes: Iterable[str]) -> Iterator[Tensor]:
    """Tensors in these attributes of the optimizer and of those that it wraps.

    accelerate's optimizer wraps DeepSpeed's, which wraps torch's; not every one has each attribute.
    """
    # By identity, so that each optimizer is asked once, even where two refer to one another.
    seen_ids = set[int]()
    while optimizer is not None and id(optimizer) not in seen_ids:
        seen_ids.add(id(optimizer))
        values = [getattr(optimizer, name, None) for name in attributes]
        yield from _tensors_within(values)
        optimizer = getattr(optimizer, "optimizer", None)


def _tensors_within(values: list[object]) -> Iterator[Tensor]:
    """Tensors among values, and in the dicts, lists and tuples among them; the last value first."""
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
