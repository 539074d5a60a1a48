"""Real faults injected into real runs: `python -m benchmarks.reliability`."""
