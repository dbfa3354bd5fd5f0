"""A person's review of questions, one by one: the questions, the decisions on them, and the files that result."""
