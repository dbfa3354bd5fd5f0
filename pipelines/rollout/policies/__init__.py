"""What generates: one file a kind of policy."""
