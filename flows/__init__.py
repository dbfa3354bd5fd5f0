"""Prefect flows and the command line: they call the stages and decide nothing about the science."""
