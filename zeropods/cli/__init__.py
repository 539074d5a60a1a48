"""`zeropods VERB`: a file a verb, each reads flags, calls one function and says what it answered."""

from zeropods.cli.root import main, parser

__all__ = ["main", "parser"]
