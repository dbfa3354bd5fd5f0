"""The analysis of SQL text with sqlglot. It runs in workers only (`session.py`); `sql/analyst.py` asks them."""
