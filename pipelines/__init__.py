"""All that sqltrain is about: plain typed Python, with no orchestrator and no tracker in it."""
