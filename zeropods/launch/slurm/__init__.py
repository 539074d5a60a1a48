"""A launch as a SLURM job: rendered, submitted, followed, recorded."""
