"""Questions that a person looks through one by one: what each holds, what was decided, which files come of it."""
