"""Nightly retraining: new questions as batches, what is trained on them, and whether it takes the champion's place."""
