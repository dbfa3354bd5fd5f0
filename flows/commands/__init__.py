"""The commands of `sqltrain`, a module for each part of its help; what they do is in the modules beside this folder."""
