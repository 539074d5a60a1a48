"""transformers' trainer, going on from a checkpoint also where it had ended or other ranks have saved it."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from zeropods.train.random_numbers import draw_anew
from zeropods.train.resumption import Resumption
from zeropods.train.universal_loading import expect_universal, universal_loaded


class ResumingTrainer(Trainer):
    """`Trainer` that does as its `resumption` says, which is set before training begins."""

    control: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resumption = Resumption()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch, where the checkpoint that was loaded is not of the end."""
        if self.resumption.has_ended(self.state):
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and load what is resumed, also where another number of ranks has saved it."""
        if self.resumption.universal:
            expect_universal(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        return super()._prepare_for_training(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what DeepSpeed has not loaded just before."""
        if self.resumption.universal:
            universal_loaded(self.model_wrapped)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with the random numbers of this rank; of another number of ranks no rank has had them."""
        if self.resumption.other_ranks:
            draw_anew(self.args.seed, self.resumption.step, self.args.world_size, self.args.process_index)
        else:
            super()._load_rng_state(checkpoint)
