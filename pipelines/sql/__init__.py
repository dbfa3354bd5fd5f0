"""SQL: sandboxed execution, named equalities, schemas and the analysis of queries."""
