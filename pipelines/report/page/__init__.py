"""The parts of the HTML report: safe markup, charts, tables, the trajectory reader's data, and the page itself."""
