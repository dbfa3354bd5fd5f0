"""Nightly retraining: new questions as batches, a challenger trained on them, and its promotion to champion."""
