"""Adapting a model to one's own database: its questions, the recipe that a person reads, its cost, its outcome."""
