"""A WikiSQL query: its parts, its text, its execution."""
