"""Evaluation: verdicts into metrics with intervals, error classes, paired tests and reports."""
