"""The stage graph as Prefect flows, and nothing else."""
