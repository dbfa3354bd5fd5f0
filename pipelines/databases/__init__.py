"""One's own databases: a card of each that a person edits, and what in them will hurt."""
