"""The demo page: a trained text-to-SQL model, a table, a question in plain English, and the model's answer."""
