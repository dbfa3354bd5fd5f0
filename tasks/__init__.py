"""Thin Prefect tasks, one per stage; the only room that knows MLflow and Great Expectations."""
