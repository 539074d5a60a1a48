"""A run's weights as a model folder that anyone can load, put together from what its ranks have saved."""

DTYPES = ("float32", "bfloat16", "float16")
"""What exported numbers may be; those of a checkpoint are FP32."""
