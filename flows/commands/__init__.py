"""The commands of `sqltrain`: a module for each panel of its help."""
