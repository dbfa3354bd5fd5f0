"""One class a database engine: how to open it with the least privilege, and how to run one statement within limits."""
