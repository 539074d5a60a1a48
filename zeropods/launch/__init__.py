"""A launch as data, and the processes that run it."""
