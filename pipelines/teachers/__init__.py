"""Teachers, judges and other experts behind HTTP: their prompts, and the reading of their answers."""
