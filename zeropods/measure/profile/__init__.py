"""A report of DeepSpeed's flops profiler: read into numbers, checked, mended."""
