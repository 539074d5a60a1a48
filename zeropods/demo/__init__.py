"""The demo page: a trained text-to-SQL model, a table, a question in plain English, and what the model makes of it."""
