"""What a run measures and how it is recorded."""
