"""Every call of a model behind HTTP: the client, what it was asked, what it answered, how fast and for how much."""
