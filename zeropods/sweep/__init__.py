"""A matrix of runs: what is measured, in which order, and what came of it."""
