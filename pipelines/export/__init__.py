"""A trained model as others take it: a folder for a hub, adapters alone, or what Ollama imports, with its card."""
