"""Print the folder for lm-eval's `--include_path`."""

from pathlib import Path

print(Path(__file__).resolve().parent)
