"""DeepSpeed: ZeRO divides states among the ranks, as the configuration at `--deepspeed` says.

`deepspeed_config` reads that file, `deepspeed_config_check` says whether a run may begin with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from zeropods.errors import UserError
from zeropods.files import first_line, foreign_object, plain_values_only
from zeropods.programs import compile_in_turns, free_port, variable_set
from zeropods.techniques import CUSTOM
from zeropods.train import checkpoints
from zeropods.train.checkpoints import CheckpointManifest
from zeropods.train.deepspeed_config import (
    Config,
    check_operation,
    effective_config,
    read_config,
    slots_of_pod,
)
from zeropods.train.deepspeed_config_check import check_run
from zeropods.train.engines.base import Engine, held_tensors

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of a configuration that give the batch."""
MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)
"""DeepSpeed 0.19's attributes for a rank's master partition.

They are those of stages 1 and 2, of stage 3, and of `BF16_Optimizer`.
"""
PARTITIONS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
)
"""Attributes in which DeepSpeed's optimizers keep reduced gradients."""
STATES = (*MASTERS, "param_groups", "state")
"""Attributes in which DeepSpeed's optimizers and torch's keep states and, where there are any,
masters."""
WHOLE_FILES = (checkpoints.STATE, "scheduler.pt")
"""Files that each checkpoint holds undivided, and that resuming reads."""
CONVERTER_ERRORS = (ValueError, KeyError, RuntimeError, NotImplementedError, AssertionError)
"""What DeepSpeed's converter raises where it cannot convert a checkpoint."""


class DeepSpeed(Engine):
    """DeepSpeed with the configuration that the flags name."""

    is_divided_on_disk = True

    @property
    def path(self) -> str:
        """The configuration's file, as it is written on the command line."""
        return str(self.arguments.deepspeed)

    @cached_property
    def as_read(self) -> Config:
        """The configuration as it stands in its file."""
        return read_config(Path(self.path))

    # Checks, and what identifies a run.

    def check(self, ranks: int) -> None:
        """Read the configuration, check it, and set `configuration` to the one in effect.

        The one in effect writes its output into the run folder.
        """
        self._check_run(ranks)
        check_operation(self.as_read, self.path, on_gpu=torch.cuda.is_available())
        folder = Path(self.arguments.outputdir)
        self.configuration = effective_config(self.as_read, folder, slots_of_pod(ranks))

    def check_steps(self, ranks: int, steps: int) -> None:
        """Refuse a configuration that contradicts the run's number of optimizer steps."""
        self._check_run(ranks, optimizer_steps=steps)

    def _check_run(self, ranks: int, **known: object) -> None:
        """Refuse a configuration that contradicts the flags, or what else is known of the run.

        Args:
            known: as for `check_run`.
        """
        has_no_gpu = not torch.cuda.is_available()
        check_run(self.as_read, self.arguments, ranks, has_no_gpu=has_no_gpu, **known)

    def check_compiled(self) -> None:
        """Refuse to compile under ZeRO-3, which fetches weights between the operations of a
        layer."""
        how = self.arguments.compile
        if how == "off":
            return
        zero = self.as_read.get("zero_optimization") or {}
        if zero.get("stage") == 3:
            raise UserError(
                f"--compile {how} --deepspeed {self.path}: its stage 3 fetches weights within a "
                "layer; leave --compile out"
            )

    def template_for_any_batch(self) -> Config:
        """The configuration as it was read, but for the keys that give the batch.

        The flags and the number of processes give the batch too, and have been compared with it.
        """
        template = dict(self.as_read)
        for key in BATCH:
            if key in template:
                template[key] = "auto"
        return template

    @property
    def warmup_steps(self) -> int:
        """The first step, or all up to and including the profiled one, which is slow."""
        profiler = (self.configuration or {}).get("flops_profiler", {})
        if not profiler.get("enabled"):
            return 1
        return int(profiler.get("profile_step", 1)) + 1

    # The beginning of a run.

    def prepare_process(self) -> None:
        """Prepare this process: transformers' arguments start the process group."""
        _set_variables_of_one_process()
        compile_in_turns()
        spare_shared_memory()

    def settings(self, precision: str) -> dict[str, object]:
        """The configuration, and `bf16`, by which transformers fills in an `auto` in it."""
        return {"deepspeed": self.configuration, "bf16": precision == "bf16"}

    def connect(self) -> None:
        """Start the process group where transformers has not.

        On a CPU it leaves this to the trainer, and ZeRO-3 would then load a model as if on one
        process.
        """
        deepspeed.init_distributed(verbose=False)
        spare_compiler(self.configuration or {})

    def number_of_parameters(self, model: nn.Module) -> int:
        """Number of a model's parameters, where one that ZeRO-3 has divided counts as a whole."""
        return sum(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
        )

    # Saving and loading.

    def weights_to_save(
        self, model: nn.Module, optimizer: object, *, is_writer: bool
    ) -> dict[str, Tensor]:
        """The weights that ZeRO has divided among the ranks, gathered."""
        return whole_weights(model, is_writer=is_writer)

    def make_universal(self, place: Path, checkpoint: Path, manifest: CheckpointManifest) -> None:
        """Make the universal form with DeepSpeed's own converter, for the attempt that is about to
        load it.

        It is deleted at the next checkpoint, so it has no manifest. The converter makes only
        tensors and plain values from what it reads.

        Raises:
            UserError: the configuration was none of the techniques; there are no ZeRO shards, or
                they hold something other than plain values, or cannot be converted.
        """
        saved_by = manifest.origin.world_size
        if manifest.origin.model.get("deepspeed") == CUSTOM:
            raise UserError(
                f"{checkpoint}: saved by {saved_by} ranks; with a DeepSpeed configuration that is "
                f"not in dsconfig/, it can be resumed only on {saved_by} ranks"
            )
        shards_folder = manifest.shards()
        if shards_folder is None:
            raise UserError(
                f"{checkpoint}: contains no ZeRO shards; resume on the same number of ranks"
            )
        checkpoints.discard(place)
        place.mkdir(parents=True)
        for name in manifest.files.keys() & set(WHOLE_FILES):
            shutil.copyfile(checkpoint / name, place / name)
        _convert(checkpoint / shards_folder, place / f"{shards_folder}_{checkpoints.UNIVERSAL}")

    def expect_universal(self, accelerator: Any) -> None:
        """Tell DeepSpeed's engine, through the configuration from which accelerate makes it."""
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}

    @contextlib.contextmanager
    def loading_universal(self, wrapped: Any) -> Iterator[None]:
        """Let DeepSpeed's engine load a universal checkpoint within the block, and correct it."""
        wrapped._config.load_universal_checkpoint = True
        yield
        self.correct_universal(wrapped)

    def correct_universal(self, wrapped: Any) -> None:
        """Correct the universal checkpoint that DeepSpeed's engine has loaded.

        From then on the engine loads ordinary checkpoints again. ZeRO-3 gives all its sub-groups
        one shared tensor that counts steps: each sub-group would advance it for all, and Adam's
        bias correction would be that of a later step.
        """
        wrapped._config.load_universal_checkpoint = False
        # DeepSpeed's optimizer wraps torch's; without ZeRO it is torch's own.
        optimizer = getattr(wrapped.optimizer, "optimizer", wrapped.optimizer)
        for state in optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    # What this rank holds.

    def call_before_step(self, wrapped: Any, act: Callable[[], None]) -> None:
        """Replace the engine's `step` for its next call.

        No callback comes between DeepSpeed's reduction of the gradients and its step, which drops
        them: to accelerate all of it is one backward pass.
        """
        step = wrapped.step

        def step_after_act(*arguments: Any, **options: Any) -> Any:
            # The attribute of the instance goes, so that the class's method is found again.
            del wrapped.step
            act()
            return step(*arguments, **options)

        wrapped.step = step_after_act

    def parameters(self, model: nn.Module) -> Iterator[object]:
        """The parameters, and what ZeRO-3 keeps of them."""
        for parameter in model.parameters():
            yield parameter.data
            # This rank's share of it under ZeRO-3; the parameter itself is empty unless gathered.
            yield getattr(parameter, "ds_tensor", None)
            # The pod's second copy under hpZ, of which this rank has its share until the
            # optimizer's step.
            yield getattr(parameter, "ds_secondary_tensor", None)

    def gradients(self, model: nn.Module, optimizer: object) -> Iterator[object]:
        """Gradients in the parameters, in the optimizer's partitions and in its masters."""
        for parameter in model.parameters():
            yield parameter.grad
            yield getattr(parameter, "grad_accum", None)
        yield from held_tensors(optimizer, PARTITIONS)
        for master in held_tensors(optimizer, MASTERS):
            yield master.grad

    def updated_weights(self, optimizer: object) -> list[Tensor]:
        """The rank's partition of the masters, or what torch's groups hold where there are none."""
        masters = list(held_tensors(optimizer, MASTERS))
        if masters:
            return masters
        return super().updated_weights(optimizer)

    def optimizer_states(self, optimizer: object) -> Iterator[Tensor]:
        """The states of DeepSpeed's optimizer and of torch's, which it wraps."""
        return held_tensors(optimizer, STATES)


def _set_variables_of_one_process() -> None:
    """Set the environment variables from which DeepSpeed makes its process group, for one process
    that no launcher has started."""
    if "RANK" in os.environ:
        return
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )


@torch.no_grad()
def whole_weights(model: nn.Module, *, is_writer: bool) -> dict[str, Tensor]:
    """Gather the weights that ZeRO has divided among the ranks; every rank must call this.

    The result holds FP32 weights by name, on the CPU, tied weights once, and the buffers that are
    saved with them. DeepSpeed's own gathering gives ZeRO-3's BF16 copies, which have lost their low
    bits, and a copy for each name of a tied weight. Here the optimizer's masters are gathered, one
    at a time.

    Args:
        is_writer: False for a rank that only takes part; its result is empty.
    """
    whole = {}
    for name, parameter in model.named_parameters():
        gathered = safe_get_full_fp32_param(parameter)
        if not is_writer:
            continue
        if gathered is None:
            # Stage 0 has no master besides the parameter itself.
            gathered = parameter.detach()
        # At stage 3 the parameter's own shape is not whole.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole[name] = gathered.to("cpu", torch.float32, copy=True).view(shape)
    if is_writer:
        whole |= _saved_buffers(model)
    return whole


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the buffers that are saved with a model's weights, by name."""
    buffers = {}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and is_saved:
                # The model itself is a module without a name.
                full_name = f"{module_name}.{name}".lstrip(".")
                buffers[full_name] = buffer.to("cpu", copy=True)
    return buffers


def _convert(shards: Path, universal: Path) -> None:
    """Convert a folder of ZeRO's shards with DeepSpeed's converter, which prints nothing here.

    Raises:
        UserError: the shards hold something other than plain values, or cannot be converted.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(shards),
        output_folder=str(universal),
        # Worker processes would each hold a rank's states.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            plain_values_only(),
        ):
            ds_to_universal.main(options)
    except pickle.UnpicklingError as error:
        fault = f"contains {foreign_object(error)}, which is not a plain value"
        raise UserError(f"{shards}: {fault}; the file will not be opened") from None
    except CONVERTER_ERRORS as error:
        fault = f"cannot be converted ({first_line(error)})"
        remedy = "resume on the same number of ranks"
        raise UserError(f"{shards}: {fault}; {remedy}") from None


# torch's compiler, which DeepSpeed would load for an optimizer that a run does not have.


def spare_compiler(config: Mapping[str, Any]) -> None:
    """Import DeepSpeed's Muon without torch's compiler, unless the configuration asks for Muon.

    DeepSpeed imports Muon to check whether the optimizer of a run is one, and decorates it to be
    compiled: loading the compiler costs each rank more than a second and 40 MB. Other optimizers
    compile nothing, so results stay the same.

    Source: deepspeed/runtime/zero/utils.py, `is_zero_supported_optimizer`;
    torch/_dynamo/eval_frame.py, `_optimize`.
    """
    optimizer = config.get("optimizer") or {}
    if str(optimizer.get("type", "")).lower() == "muon":
        return
    # Another version of DeepSpeed may not have this module.
    with variable_set("TORCHDYNAMO_DISABLE", "1"), contextlib.suppress(ImportError):
        import_module("deepspeed.runtime.zero.muon.original_muon")


# DeepSpeed's operation that adds tensors up in shared memory, which training never calls.
#
# DeepSpeed (0.19.8, comm/torch.py) loads it wherever ranks have no GPU, for tensor-parallel
# inference. Loading it compiles it, or waits for the process that does; each rank then puts a
# buffer of 66 MiB into `/dev/shm`, which stays there however the rank ends, and which a container
# with the usual 64 MiB has no room for (ops/csrc/cpu/comm/shm.cpp).


def spare_shared_memory() -> None:
    """Let DeepSpeed create its process groups without the shared-memory operation, in this process.

    It is marked as one that cannot be compiled here.
    """
    # Read as an attribute of the module, the dict would first be filled by trying the compilers of
    # every operation. Nothing else is looked up in it.
    compatible = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    compatible["deepspeed_shm_comm"] = False
