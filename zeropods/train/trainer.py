"""transformers' trainer with our order of data, our evaluation, and FP32 masters of BF16 weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import Trainer, TrainerCallback, set_seed
from transformers.utils import SAFE_WEIGHTS_NAME

from zeropods.files import open_to_readers, said_in_one_line, seal_model
from zeropods.tables import ProgressLines
from zeropods.train.job import Task
from zeropods.train.meter import Meter
from zeropods.train.resume import Checkpoints, Resumption
from zeropods.train.sampler import LengthGroupedSampler, TokenizedSplit, evaluation_batches

if TYPE_CHECKING:
    from tqdm import tqdm


class MeasuredTrainer(Trainer):
    """`Trainer` whose figures do not depend on the number of processes, and which resumes on any number of them."""

    control: Any
    train_dataset: TokenizedSplit
    eval_dataset: TokenizedSplit
    lr_scheduler: Any
    optimizer: Any
    checkpoints: Checkpoints
    """Completes what is saved, and verifies what is loaded; must be set before training that saves."""

    def __init__(self, task: Task, meter: Meter, **kwargs: Any) -> None:
        """Set up `Trainer` with a task's rows, tokenizer and batches.

        Args:
            task: what is particular to a script's runs; its arguments may ask for rates by kind of weight, for
                compiled passes, and for an end after some time.
            meter: measures the run.
        """
        super().__init__(
            train_dataset=task.data.train,
            eval_dataset=task.data.dev,
            data_collator=task.batch,
            processing_class=task.data.tokenizer,
            **kwargs,
        )
        self.asked = task.arguments
        self.limit = TimeLimit(self.asked.max_train_seconds) if self.asked.max_train_seconds else None
        self.sampler: LengthGroupedSampler | None = None
        self.resumption: Resumption | None = None
        """What training resumes from; None for a new start."""
        self.evaluated: tuple[float, int] | None = None
        """Summed loss in nats, and number of label tokens, of the last evaluation."""
        self.meter = meter
        self.add_callback(meter)
        if self.limit is not None:
            self.add_callback(self.limit)

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self.sampler = LengthGroupedSampler(self.train_dataset.lengths(), per_step, self.args.seed)
        return self.sampler

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Do one forward and backward pass, and count its tokens."""
        self.meter.count(inputs)
        if self.asked.compile == "graphs":
            # Results of the previous step are no longer needed: CUDA graphs overwrite them.
            torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.meter.heartbeat.mark()
        return loss

    def engine(self) -> Any:
        """DeepSpeed's engine; None where there is none, or not yet."""
        return self.model_wrapped if self.is_deepspeed_enabled and self.model_wrapped is not self.model else None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer, with groups of different rates where that was asked for."""
        if self.optimizer is None and self.asked.scaled_rates:
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = chosen[0](rate_groups(self.model, chosen[1]["lr"], self.args.weight_decay), **chosen[1])
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule asked for, or one that also ends with the training time."""
        if self.lr_scheduler is None and (limit := self.limit) is not None:
            warmup = max(1, self.args.get_warmup_steps(num_training_steps))

            def rate(step: int) -> float:
                """Factor of the rate: linear decay over steps or seconds, whichever is further, after the warm-up."""
                left = 1.0 - min(1.0, max(step / num_training_steps, limit.share()))
                return left * min(1.0, (step + 1) / warmup)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss per label token: token losses and counts are summed over ranks, then divided.

        transformers' own `eval_loss` is a mean of means, and depends on the number of processes.
        """
        began = time.perf_counter()
        self.evaluated = total, tokens = self.summed_loss(self.eval_dataset)
        seconds = time.perf_counter() - began
        rate = len(self.eval_dataset) / seconds
        metrics = {"eval_loss": total / tokens, "eval_runtime": seconds, "eval_samples_per_second": rate}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def summed_loss(self, rows: TokenizedSplit) -> tuple[float, int]:
        """Summed loss in nats and number of label tokens of all rows, over all ranks; every rank takes part."""
        args = self.args
        # The model runs uncompiled: an evaluation has batches of other sizes, and is short.
        eager = nullcontext() if self.asked.compile == "off" else torch.compiler.set_stance("force_eager")
        with self.meter.within("evaluate"), eager:
            was_training = self.model.training
            self.model.eval()
            sums = torch.zeros(2, dtype=torch.float64, device=args.device)
            mine = evaluation_batches(rows, args.eval_batch_size, args.process_index, args.world_size)
            for indices, weight in mine:
                batch = self._prepare_inputs(self.data_collator([rows[i] for i in indices]))
                loss = self.model(**batch, num_items_in_batch=1).loss
                sums[0] += weight * loss.double()
                sums[1] += weight * batch["label_positions"].numel()
                self.meter.heartbeat.mark()
            self.model.train(was_training)
            total, tokens = self.accelerator.reduce(sums, "sum").tolist()
            return total, int(tokens)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights in FP32; every rank takes part."""
        folder = Path(output_dir or self.args.output_dir)
        in_one_line = said_in_one_line(folder, "the model", "free or repair the disk, then run again")
        with self.meter.within("save"), in_one_line:
            if self.is_deepspeed_enabled:
                self._save(output_dir, whole_weights(self.model, keep=self.args.should_save))
            else:
                super().save_model(output_dir, _internal_call)
            # A model that is saved internally is part of a checkpoint, whose manifest holds its digests.
            if self.args.should_save and not _internal_call:
                seal_model(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save what a later attempt goes on from."""
        write = partial(super()._save_checkpoint, model, trial)
        with self.meter.within("save"):
            self.checkpoints.save(self.state.global_step, write, lambda: self.state.best_model_checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch in its own order, unless the loaded checkpoint is that of the run's end.

        transformers sets the sampler's epoch too, but does not reach the sampler on several processes once a resumed
        run has skipped rows of its first epoch: that epoch would have the order of epoch 0.
        """
        if self.sampler is not None:
            self.sampler.set_epoch(int(self.state.epoch or 0))
        if self.resumption is not None and self.resumption.has_ended(self.state):
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and load the checkpoint to resume; DeepSpeed's configuration tells its engine if it is universal."""
        if self.resumption is not None and self.resumption.universal:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        return super()._prepare_for_training(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what DeepSpeed has not already loaded."""
        if self.resumption is not None and self.resumption.universal:
            correct_universal(self.model_wrapped)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with this rank's random numbers; on another number of ranks, start new ones.

        New ones depend on seed, step, number of ranks and rank. They set dropout masks, but not the order of rows.
        """
        args, resumed = self.args, self.resumption
        if resumed is not None and resumed.saved.origin.world_size != args.world_size:
            place = (args.seed, resumed.saved.step, args.world_size, args.process_index)
            set_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        else:
            super()._load_rng_state(checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the FP32 masters where there are any: the BF16 copies have lost their low bits.

        Only a rank that should save writes: transformers 5.17 expects its callers to see to that, 5.23 sees to it here.
        """
        if not self.args.should_save:
            return
        masters = self._masters()
        if masters and state_dict is None:
            named = self.model.state_dict(keep_vars=True)
            state_dict = {name: masters.get(id(value), value.detach()) for name, value in named.items()}
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        open_to_readers(folder)
        # Our classes differ from transformers' only in their loss.
        bases = (base for base in type(self.model).__mro__ if base.__module__.startswith("transformers."))
        self.model.config.architectures = [next(bases).__name__]
        self.model.config.dtype = self.model.config.dtype if state_dict is None else torch.float32
        self.model.config.save_pretrained(folder)

    def _load_best_model(self) -> None:
        """Load the best checkpoint into the model, and into the masters where there are any."""
        best = self.state.best_model_checkpoint
        with self.meter.within("load"):
            manifest = self.checkpoints.check(Path(best), best, "--resume auto resumes from a complete one")
            fitted = str(self.checkpoints.fitted(Path(best), manifest))
            self.state.best_model_checkpoint = fitted
            if fitted != best:
                self.model_wrapped._config.load_universal_checkpoint = True
            super()._load_best_model()
            if fitted != best:
                correct_universal(self.model_wrapped)
            self.state.best_model_checkpoint = best
            named, masters = self.model.state_dict(keep_vars=True), self._masters()
            with torch.no_grad():
                for name, saved in (load_file(Path(best) / SAFE_WEIGHTS_NAME) if masters else {}).items():
                    masters[id(named[name])].copy_(saved)

    def _masters(self) -> dict[int, Tensor]:
        """The FP32 master of each parameter by `id(parameter)`; empty where there are no masters."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer.masters_by_copy() if isinstance(optimizer, MasterAdamW) else {}


@dataclass(eq=False)
class ShownSteps(TrainerCallback):
    """Shows the steps of a run and its last loss."""

    bar: tqdm | ProgressLines
    ends_by_time: bool
    """Whether a time limit ends the run, so that nobody knows how many steps there will be."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.total = None if self.ends_by_time else state.max_steps
        self.bar.update(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        losses = {name: f"{logs[name]:.4g}" for name in ("loss", "eval_loss") if name in logs}
        if losses:
            self.bar.set_postfix(losses, refresh=False)


@dataclass(eq=False)
class TimeLimit(TrainerCallback):
    """Ends training when its time is up; for one process only, since clocks differ."""

    seconds: float
    began: float | None = None

    def share(self) -> float:
        """Fraction of the time that has passed, 1 at its end; 0 before training."""
        return 0.0 if self.began is None else (time.monotonic() - self.began) / self.seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.share() >= 1:
            control.should_training_stop = True


def correct_universal(engine: Any) -> None:
    """Correct the universal checkpoint that DeepSpeed's engine has loaded, and let it load ordinary ones from then on.

    ZeRO-3 gives all its sub-groups one shared tensor that counts steps: each sub-group would advance it for all, and
    Adam's bias correction would be that of a later step.
    """
    engine._config.load_universal_checkpoint = False
    # DeepSpeed's optimizer wraps torch's; without ZeRO it is torch's own.
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


@torch.no_grad()
def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather the weights that ZeRO has divided among the ranks; every rank must call this.

    The result holds FP32 weights by name, on the CPU, tied weights once, and the buffers that are saved with them.
    DeepSpeed's own gathering gives ZeRO-3's BF16 copies, which have lost their low bits, and a copy for each name of a
    tied weight. Here the optimizer's masters are gathered, one at a time.

    Args:
        keep: False for a rank that only takes part; its result is empty.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    whole = {}
    for name, parameter in model.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if keep:
            # Stage 0 has no master besides the parameter itself; at stage 3 the parameter's own shape is not whole.
            gathered = parameter.detach() if master is None else master
            shape = getattr(parameter, "ds_shape", parameter.shape)
            whole[name] = gathered.to("cpu", torch.float32, copy=True).view(shape)
    if not keep:
        return whole
    for place, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                whole[f"{place}.{name}".lstrip(".")] = buffer.to("cpu", copy=True)
    return whole


# AdamW over an FP32 master of BF16 parameters.
#
# BF16 weights alone do not learn: an update smaller than a weight's last bit is rounded away. Autocast
# keeps FP32 weights instead, and casts all of them in every step. Here the casts happen once, after the
# update, and gradients are BF16, as in mixed precision training (Micikevicius et al., arXiv:1710.03740).

Model = TypeVar("Model", bound=nn.Module)


class MasterAdamW(AdamW):
    """AdamW that keeps an FP32 master of every parameter, and writes the rounded copy back.

    The optimizer's own groups hold the masters, so that its state (and a checkpoint of it) is FP32
    and complete: `state_dict` carries the masters as well.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = [dict(group) for group in groups]
        self.copies: list[Tensor] = [copy for group in groups for copy in group["params"]]
        for group in groups:
            group["params"] = [p.detach().float().clone() for p in group["params"]]
        super().__init__(groups, **options)

    @property
    def masters(self) -> list[Tensor]:
        """The masters in the order of the groups, which is that of `copies`."""
        return [master for group in self.param_groups for master in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters from the copies' gradients, then round the masters into the copies."""
        pairs = zip(self.masters, self.copies, strict=True)
        trained = [(master, copy.grad) for master, copy in pairs if copy.grad is not None]
        wide = [torch.empty_like(master) for master, _ in trained]
        if wide:
            # On a GPU this takes a few kernels for all gradients, not one for each.
            torch._foreach_copy_(wide, [narrow for _, narrow in trained])
        for (master, _), gradient in zip(trained, wide, strict=True):
            master.grad = gradient
        result = super().step(closure)
        torch._foreach_copy_(self.copies, self.masters)
        super().zero_grad()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the copies."""
        for copy in self.copies:
            copy.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the masters in the order of the groups."""
        return {**super().state_dict(), "masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masters from a state, and round them into the copies."""
        state = dict(state_dict)
        for master, saved in zip(self.masters, state.pop("masters"), strict=True):
            master.copy_(saved)
        super().load_state_dict(state)
        torch._foreach_copy_(self.copies, self.masters)

    def masters_by_copy(self) -> dict[int, Tensor]:
        """The master of each parameter, by `id(parameter)`."""
        return {id(copy): master for copy, master in zip(self.copies, self.masters, strict=True)}


def round_to_bf16(model: Model) -> Model:
    """Round a model's parameters to BF16 in place. Buffers stay: rotary angles of long texts need all their bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


# Learning rates by kind of weight, for a T5 that starts from random weights.
#
# AdamW moves every weight by about the learning rate, whatever its size. T5 was made with Adafactor, which
# steps in proportion to a weight's size (Shazeer & Stern 2018, arXiv:1804.04235), and its weights are drawn for
# that: the embedding with deviation 1, norms at 1, others with about d_model ** -0.5. Above all the relative
# position bias must grow from 0.1 to several units before a head can attend to the neighbouring token: at a
# common rate of 0.001 that alone takes thousands of steps. In trials of t5-tiny, after
# 1,000 steps of 16 rows, a target cost 8.8 nats with only the embedding raised, 4.3 with the position bias
# at 30 as well, 3.2 with all three: one run each, and the first had a longer schedule and another
# initialisation, so the size of the gain is rough. The factors were not searched further.

RATES = {"shared": 30.0, "relative_attention_bias": 100.0, "layer_norm": 10.0}
"""Factors of the common learning rate, for weights whose name contains the key."""


def rate_groups(model: nn.Module, rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each factor of `RATES`, the common rate first."""
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in model.named_parameters():
        factor = next((factor for key, factor in RATES.items() if key in name), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [{"params": each, "lr": rate * factor, "weight_decay": weight_decay} for factor, each in by_factor.items()]
