"""Batched decoding of many conversations over one in-process model."""
