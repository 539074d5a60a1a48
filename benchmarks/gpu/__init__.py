"""Training and prediction on one GPU against the original's recipe, cell by cell (`make
bench-gpu`)."""
