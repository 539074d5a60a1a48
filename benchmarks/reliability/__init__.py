"""Faults injected into real runs for real: `python -m benchmarks.reliability`."""
