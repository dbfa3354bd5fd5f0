"""The stages of a run and the one graph that both the plain run and the Prefect flow walk."""
