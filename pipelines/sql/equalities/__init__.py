"""Named equalities of query results, each true to the evaluator that it comes from."""
