"""Readers that turn benchmarks, a user's own files and the generated miniature world into examples."""
