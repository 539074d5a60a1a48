"""Raw data turned into examples, and examples into tokenized sets."""
