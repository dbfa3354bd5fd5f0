"""The miniature world: databases and questions generated from a seed, small enough to learn from scratch on a CPU."""
