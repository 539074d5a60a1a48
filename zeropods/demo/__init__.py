"""The demo page: a trained text-to-SQL model answers questions in plain English on a table."""
