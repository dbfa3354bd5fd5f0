"""What a recipe may say, how it is read, and the registries of the parts that it names."""
