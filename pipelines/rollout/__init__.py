"""Making trajectories: episodes over a policy, a protocol and a database."""
