"""Training: the models, the samples, SFT and GRPO on TRL, and the child process that runs them."""
