"""Sweeps: tables whose cells are evaluations, the claims they test, and their pages."""
