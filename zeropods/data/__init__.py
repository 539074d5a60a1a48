"""Raw data to examples to tokenized sets."""
