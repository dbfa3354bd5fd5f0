-- PostgreSQL's first start makes POSTGRES_DB (prefect); MLflow's database is made here.
CREATE DATABASE mlflow;
