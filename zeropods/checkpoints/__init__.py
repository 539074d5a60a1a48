"""Checkpoints that are complete or do not count: manifest, pointer, and the newest one that verifies."""
