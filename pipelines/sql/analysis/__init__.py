"""What SQL text says, read with sqlglot. It runs in workers only (`session.py`); others ask `sql/analyst.py`."""
