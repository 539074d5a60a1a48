"""Metrics for `evaluate.load`: each folder here is one, by its path."""
