"""The agent as a service: questions in, turns and an answer out, for users, programs and MCP clients."""
