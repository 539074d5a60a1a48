"""Measure DeepSpeed ZeRO fine-tuning on your own pods."""

__version__ = "0.1.0"
