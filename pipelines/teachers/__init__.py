"""What is bought from models behind HTTP: answers kept for ever, and what is made of them."""
