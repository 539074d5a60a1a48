"""Where worker pods come from; `base` says what a backend is."""

BACKEND_NAMES = ("local", "cml")
"""Names of the backends that a user may choose; the first one is taken where no backend says that
its workers are here. They stand here so that a command line is read without importing a backend."""
