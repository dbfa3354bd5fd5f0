"""The report of a run: its data, tables, formats, terminal text and page."""
