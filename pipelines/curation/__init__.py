"""Curation of training data: the kept trajectories, the questions that are worth RL, and their gold schema."""
