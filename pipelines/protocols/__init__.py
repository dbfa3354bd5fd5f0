"""How an agent speaks: one class a protocol, each with prompt, parse, observe, write and tracks."""
