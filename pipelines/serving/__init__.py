"""The agent as a service: questions in, turns and an answer out, whoever asks and whatever speaks the protocol."""
