"""What becomes training data: which trajectories are kept, which questions are worth RL, and their gold schema."""
