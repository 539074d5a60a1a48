"""transformers' trainer with our order of data, our evaluation and our checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, set_seed

from zeropods.files import open_to_readers, said_in_one_line, seal_model
from zeropods.tables import ProgressLines, SampleRate, duration_text
from zeropods.train.job import SummedLoss, Task
from zeropods.train.meter import Meter
from zeropods.train.sampler import LengthGroupedSampler, TokenizedSplit, evaluation_batches
from zeropods.train.save_and_resume import Checkpoints, Resumption

if TYPE_CHECKING:
    from tqdm import tqdm


class MeasuredTrainer(Trainer):
    """`Trainer` whose figures do not depend on the number of processes.

    It resumes on any number of them.
    """

    control: Any
    train_dataset: TokenizedSplit
    eval_dataset: TokenizedSplit
    lr_scheduler: Any
    optimizer: Any
    checkpoints: Checkpoints
    """Completes what is saved, and verifies what is loaded.

    It must be set before `train` is called.
    """

    def __init__(self, task: Task, meter: Meter, **kwargs: Any) -> None:
        """Set up `Trainer` with a task's rows, tokenizer and batches.

        Args:
            task: what is particular to a script's runs; its arguments may ask for rates by kind of
                weight, for compiled passes, and for an end after some time.
            meter: measures the run.
        """
        super().__init__(
            train_dataset=task.data.train,
            eval_dataset=task.data.dev,
            data_collator=task.batch,
            processing_class=task.data.tokenizer,
            **kwargs,
        )
        self.run_arguments = task.arguments
        self.engine = task.engine
        self.meter = meter
        self.sampler: LengthGroupedSampler | None = None
        self.resumption: Resumption | None = None
        """What training resumes from; None for a new start."""
        self.last_evaluation: SummedLoss | None = None
        """Loss on the dev split at the last evaluation; None before the first one."""
        self.time_limit: TimeLimit | None = None
        """Ends the training after some time; None where steps or epochs end it."""
        self.add_callback(meter)
        if self.run_arguments.max_train_seconds:
            self.time_limit = TimeLimit(self.run_arguments.max_train_seconds)
            self.add_callback(self.time_limit)

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        """The order of the training rows; it is kept in `sampler`, for `_run_epoch`."""
        rows_per_pass = self.args.train_batch_size * self.args.world_size
        rows_per_step = rows_per_pass * self.args.gradient_accumulation_steps
        lengths = self.train_dataset.lengths()
        self.sampler = LengthGroupedSampler(lengths, rows_per_step, self.args.seed)
        return self.sampler

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Do one forward and backward pass, and count its tokens; return its loss."""
        self.meter.count(inputs)
        if self.run_arguments.compile == "graphs":
            # Results of the previous step are no longer needed: CUDA graphs overwrite them.
            torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.meter.heartbeat.mark()
        return loss

    # The optimizer, and the schedule of its rate.

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer, with groups of different rates for `--scaled_rates`."""
        if self.optimizer is None and self.run_arguments.scaled_rates:
            class_and_options = self.optimizer_cls_and_kwargs
            if not class_and_options:
                # The engine has chosen none, so it is transformers' choice.
                class_and_options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            optimizer_class, options = class_and_options
            groups = rate_groups(self.model, options["lr"], self.args.weight_decay)
            self.optimizer = optimizer_class(groups, **options)
        # Where there is one by now, transformers makes none.
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that the flags name; under a time limit, one that also ends with the time.

        It is kept in `lr_scheduler`.
        """
        if self.lr_scheduler is None and self.time_limit is not None:
            warmup_steps = max(1, self.args.get_warmup_steps(num_training_steps))
            factor = _factor_until_time_is_up(num_training_steps, warmup_steps, self.time_limit)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
            # transformers notes this where it makes one itself, so that a second training does not
            # go on with it.
            self._created_lr_scheduler = True
        # Where there is one by now, transformers makes none.
        return super().create_scheduler(num_training_steps, optimizer)

    # Evaluation.

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate the dev split, and return the metrics that are logged; every rank takes part.

        `eval_loss` is the mean loss per label token: token losses and counts are summed over ranks,
        then divided. transformers' own is a mean of means, and depends on the number of processes.
        The loss is kept in `last_evaluation`. transformers' arguments are not used.
        """
        began = time.perf_counter()
        loss = self.summed_loss(self.eval_dataset)
        self.last_evaluation = loss
        seconds = time.perf_counter() - began
        metrics = {
            "eval_loss": loss.nats / loss.tokens,
            "eval_runtime": seconds,
            "eval_samples_per_second": len(self.eval_dataset) / seconds,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @torch.no_grad()
    def summed_loss(self, rows: TokenizedSplit) -> SummedLoss:
        """Loss of the model on all these rows, over all ranks; every rank takes part."""
        args = self.args
        with self._uncompiled(), self.meter.within("evaluate"):
            was_training = self.model.training
            self.model.eval()
            nats_and_tokens = torch.zeros(2, dtype=torch.float64, device=args.device)
            batches = evaluation_batches(
                rows, args.eval_batch_size, args.process_index, args.world_size
            )
            for indices, weight in batches:
                collated = self.data_collator([rows[i] for i in indices])
                batch = self._prepare_inputs(collated)
                # The sum over the batch's label tokens, since it is divided by 1.
                loss = self.model(**batch, num_items_in_batch=1).loss
                # The weight is 0 for a batch that counts on another rank.
                nats_and_tokens[0] += weight * loss.double()
                nats_and_tokens[1] += weight * batch["label_positions"].numel()
                self.meter.heartbeat.mark()
            self.model.train(was_training)
            nats, tokens = self.accelerator.reduce(nats_and_tokens, "sum").tolist()
            return SummedLoss(nats, int(tokens))

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Let the model run uncompiled: an evaluation has batches of other sizes, and is short."""
        if self.run_arguments.compile == "off":
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights in FP32, configuration and tokenizer; every rank takes part.

        Args:
            output_dir: the folder; None for that of the trainer's arguments.
            _internal_call: True where transformers saves the model as part of a checkpoint.

        Raises:
            UserError: the folder cannot be written to.
        """
        folder = Path(output_dir or self.args.output_dir)
        remedy = "free or repair the disk, then run again"
        with self.meter.within("save"), said_in_one_line(folder, "the model", remedy):
            weights = self.engine.weights_to_save(
                self.model, self.optimizer, is_writer=self.args.should_save
            )
            if weights is None:
                # transformers saves what the model holds, by `_save` below.
                super().save_model(output_dir, _internal_call)
            else:
                self._save(output_dir, weights)
            # A model that is saved internally is part of a checkpoint, whose manifest holds its
            # digests.
            if self.args.should_save and not _internal_call:
                seal_model(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save what a later attempt goes on from; every rank takes part."""
        write = partial(super()._save_checkpoint, model, trial)

        def best_checkpoint() -> str | None:
            # Not read before: writing a checkpoint may make it the best one.
            return self.state.best_model_checkpoint

        with self.meter.within("save"):
            self.checkpoints.save(self.state.global_step, write, best_checkpoint)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Save a model with a configuration that names transformers' own class.

        Only a rank that should save writes: transformers 5.17 expects its callers to see to that,
        5.23 sees to it here.

        Args:
            state_dict: the weights in FP32, by name; None where the model itself holds them.
        """
        if not self.args.should_save:
            return
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        open_to_readers(folder)
        # The project's own classes differ only in their loss from those of transformers, so the
        # nearest class of transformers among their bases can load what is saved.
        classes = type(self.model).__mro__
        library_classes = [base for base in classes if base.__module__.startswith("transformers.")]
        config = self.model.config
        config.architectures = [library_classes[0].__name__]
        if state_dict is not None:
            # The model's own weights may be BF16, and the configuration with them.
            config.dtype = torch.float32
        config.save_pretrained(folder)

    # Loading, and resuming.

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch in its own order, unless the run had ended at the loaded checkpoint.

        transformers sets the sampler's epoch too, but does not reach the sampler on several
        processes once a resumed run has skipped rows of its first epoch: that epoch would have the
        order of epoch 0.
        """
        if self.sampler is not None:
            self.sampler.set_epoch(int(self.state.epoch or 0))
        if self.resumption is not None and self.resumption.has_ended(self.state):
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and load the checkpoint to resume, which may be universal."""
        if self._resumes_from_universal():
            self.engine.expect_universal(self.accelerator)
        return super()._prepare_for_training(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what the engine has not already loaded."""
        if self._resumes_from_universal():
            self.engine.correct_universal(self.model_wrapped)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _resumes_from_universal(self) -> bool:
        """Whether training resumes from a checkpoint's universal form."""
        return self.resumption is not None and self.resumption.universal

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with this rank's random numbers; on another number of ranks, start new ones.

        New ones depend on seed, step, number of ranks and rank. They set dropout masks; the
        order of rows does not depend on them.
        """
        args = self.args
        resumed = self.resumption
        if resumed is None or resumed.saved.origin.world_size == args.world_size:
            super()._load_rng_state(checkpoint)
            return
        entropy = (args.seed, resumed.saved.step, args.world_size, args.process_index)
        (seed,) = np.random.SeedSequence(entropy).generate_state(1)
        set_seed(int(seed))

    def _load_best_model(self) -> None:
        """Load the best checkpoint into the model, and into the masters where there are any.

        Every rank takes part.

        Raises:
            UserError: the checkpoint is not whole, or has no form that this number of ranks can
                load.
        """
        best = self.state.best_model_checkpoint
        remedy = "--resume auto resumes from a complete one"
        with self.meter.within("load"):
            manifest = self.checkpoints.check(Path(best), best, remedy)
            loadable = str(self.checkpoints.fitted(Path(best), manifest))
            # transformers loads what the state names: for the moment it is the form that this
            # number of ranks can load.
            self.state.best_model_checkpoint = loadable
            if loadable == best:
                super()._load_best_model()
            else:
                with self.engine.loading_universal(self.model_wrapped):
                    super()._load_best_model()
            self.state.best_model_checkpoint = best
            # An engine that does this has no universal form, so the checkpoint itself was loaded.
            self.engine.load_masters(self.model, self.optimizer, Path(best))


# The end of a run after some time, and what is shown of its steps.


@dataclass(eq=False)
class TimeLimit(TrainerCallback):
    """Ends training when its time is up; for one process only, since clocks differ."""

    seconds: float
    """The time that training may take."""
    began: float | None = None
    """When training began, by the monotonic clock; None before."""

    def share(self) -> float:
        """Fraction of the time that has passed, 1 or more once it is up; 0 before training."""
        if self.began is None:
            return 0.0
        return (time.monotonic() - self.began) / self.seconds

    def seconds_left(self) -> float:
        """Seconds until the time is up, at least 0."""
        return self.seconds * max(0.0, 1 - self.share())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.share() >= 1:
            control.should_training_stop = True


def _factor_until_time_is_up(
    steps: int, warmup_steps: int, time_limit: TimeLimit
) -> Callable[[int], float]:
    """A function that returns the factor of the learning rate at a step.

    After the warm-up it decays linearly to 0: with the steps or with the time, whichever is closer
    to its end.

    Args:
        steps: number of steps of the run, where the time does not end it before.
    """

    def rate_factor(step: int) -> float:
        share_done = max(step / steps, time_limit.share())
        share_left = 1.0 - min(1.0, share_done)
        share_of_warmup = min(1.0, (step + 1) / warmup_steps)
        return share_left * share_of_warmup

    return rate_factor


@dataclass(eq=False)
class ShownSteps(TrainerCallback):
    """Shows the steps of a run, its last losses and its speed."""

    bar: tqdm | ProgressLines
    rate: SampleRate
    """Counts samples per second; it pauses while the run evaluates or saves."""
    time_limit: TimeLimit | None
    """Ends the run after some time, so that nobody knows how many steps there will be; None where
    steps or epochs end it."""
    losses: dict[str, str] = field(default_factory=dict, init=False)
    """The last losses as text, by name."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.time_limit is None:
            self.bar.total = state.max_steps
        else:
            self.bar.total = None
        # The steps that were done before the checkpoint that training resumes from.
        self.bar.update(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rate.count(state.global_step)
        self.bar.update(state.global_step - self.bar.n)
        self._show()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any
    ) -> None:
        for name in ("loss", "eval_loss"):
            if name in logs:
                self.losses[name] = f"{logs[name]:.4g}"
        self._show()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rate.pause()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rate.pause()

    def _show(self) -> None:
        values = {**self.losses, **self.rate.shown()}
        if self.time_limit is not None:
            values["limit in"] = duration_text(self.time_limit.seconds_left())
        self.bar.set_postfix(values, refresh=False)


# Learning rates by kind of weight, for a T5 that starts from random weights.
#
# AdamW moves every weight by about the learning rate, whatever its size. T5 was made with
# Adafactor, which steps in proportion to a weight's size (Shazeer & Stern 2018, arXiv:1804.04235),
# and its weights are drawn for that: the embedding with deviation 1, norms at 1, others with about
# d_model ** -0.5. Above all the relative position bias must grow from 0.1 to several units before a
# head can attend to the neighbouring token: at a common rate of 0.001 that alone takes thousands of
# steps. In trials of t5-tiny, after 1,000 steps of 16 rows, a target cost 8.8 nats with only the
# embedding raised, 4.3 with the position bias at 30 as well, 3.2 with all three: one run each, and
# the first had a longer schedule and another initialisation, so the size of the gain is rough. The
# factors were not searched further.

RATES = {"shared": 30.0, "relative_attention_bias": 100.0, "layer_norm": 10.0}
"""Factors of the common learning rate, for weights whose name contains the key."""


def rate_groups(model: nn.Module, rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one for each factor of `RATES`, the common rate first.

    Args:
        rate: the common learning rate, of weights without a factor of their own.
    """
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, parameter in model.named_parameters():
        by_factor.setdefault(_factor_of(name), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for factor, parameters in by_factor.items():
        groups.append({"params": parameters, "lr": rate * factor, "weight_decay": weight_decay})
    return groups


def _factor_of(name: str) -> float:
    """Factor of the common learning rate for a weight: that of the first key in its name."""
    for key, factor in RATES.items():
        if key in name:
            return factor
    return 1.0
