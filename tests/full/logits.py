"""Train as `textsql_train.py` does, then compare the trained model's logits with those of the model that it saved.

    python -m torch.distributed.run --nproc_per_node 2 tests/full/logits.py FLAGS

Rank 0 writes `logits.json` into the run folder.
"""

from __future__ import annotations

import sys

import torch
from transformers import T5ForConditionalGeneration
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from zeropods import files
from zeropods.measure.record import RankMeasurement
from zeropods.train import processes
from zeropods.train.arguments import TextToSQLArguments, parse_flags
from zeropods.train.attempt import make_trainer
from zeropods.train.cpu import suit_cpu
from zeropods.train.job import check_call
from zeropods.train.meter import Meter
from zeropods.train.run import training_arguments
from zeropods.train.sampler import collate
from zeropods.train.text2sql import TextToSQL

ROWS = 8


def main() -> None:
    job = check_call(TextToSQL(parse_flags(TextToSQLArguments, sys.argv[1:])))
    settings = training_arguments(job)
    (job.folder / "tensorboard").mkdir(parents=True, exist_ok=True)
    measured = RankMeasurement(rank=processes.rank(), host="here")
    trainer = make_trainer(job, settings, measured, Meter(job.folder, measured, interval=0.0, age_seconds=0.0))
    trainer.train()
    trainer.save_model(str(job.folder / "model"))
    batch = collate([job.prepared.train[index] for index in range(ROWS)])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    inputs["decoder_input_ids"] = batch["labels"].clamp(min=0)
    with torch.no_grad():
        trained = trainer.model.eval()(**inputs).logits
        # From here on a model is loaded whole, not divided among the ranks.
        unset_hf_deepspeed_config()
        if processes.rank() == 0:
            # In the same operations, so that only roundings may differ.
            loaded = suit_cpu(T5ForConditionalGeneration.from_pretrained(job.folder / "model")).eval()(**inputs).logits
            document = {"largest_difference": (trained - loaded).abs().max().item(), "rows": len(trained)}
            files.write_json(job.folder / "logits.json", document)
    processes.leave()


if __name__ == "__main__":
    main()
