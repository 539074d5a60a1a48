"""Engines of training: what holds a model and its optimizer during a run, and steps them.

`base.Engine` has all that a run asks of its engine, and nothing else asks which one it is. `ddp` is
for one process and for DistributedDataParallel, `deepspeed` for DeepSpeed. The flags of a script
name their engine: `RunArguments.engine_class`.
"""
