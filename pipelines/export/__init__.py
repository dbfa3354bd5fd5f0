"""A trained model as others take it: a folder for a hub, adapters alone, or a folder for Ollama, with its card."""
