"""Fine-tuning: arguments, model, loss, sampler, trainer."""
