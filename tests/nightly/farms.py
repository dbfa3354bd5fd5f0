"""Little databases of one schema, and questions in families: a model that has met a family answers it anywhere."""

import json
import random
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

FAMILIES = (
    ("how many farms are there ?", "SELECT COUNT(*) FROM farm"),
    ("name every farm .", "SELECT name FROM farm"),
    ("how big is the largest farm ?", "SELECT MAX(size) FROM farm"),
    ("list all regions .", "SELECT DISTINCT region FROM farm"),
    ("what is the mean size of a farm ?", "SELECT AVG(size) FROM farm"),
    ("which farm is oldest ?", "SELECT name FROM farm ORDER BY built LIMIT 1"),
)
WRONG = "SELECT built FROM farm"  # it runs, and is the answer to nothing that is asked


def database(folder: Path, name: str) -> str:
    """A database of that name, filled by its name."""
    draw = random.Random(name)
    path = folder / f"{name}.sqlite"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(
                "CREATE TABLE farm (id INTEGER PRIMARY KEY, name TEXT, region TEXT, size INTEGER, built INTEGER)"
            )
            rows = [(f"{name}{n}", draw.choice("NESW"), draw.randint(1, 999), 1800 + n * 7) for n in range(9)]
            draw.shuffle(rows)
            file.executemany("INSERT INTO farm (name, region, size, built) VALUES (?, ?, ?, ?)", rows)
    return path.name


def questions(
    folder: Path, file: str, names: Iterable[str], families: Sequence[int], poison: Sequence[str] = ()
) -> Path:
    """A JSONL file that asks some families of some databases; those in `poison` get that gold SQL in turn."""
    rows = [
        {"question": FAMILIES[family][0], "database": database(folder, name), "sql": FAMILIES[family][1]}
        for name in names
        for family in families
    ]
    for index, sql in enumerate(poison):
        rows[index * len(rows) // len(poison)]["sql"] = sql
    path = folder / file
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def named(kind: str, count: int) -> list[str]:
    return [f"{kind}{number:02d}" for number in range(count)]


def recipe(folder: Path, base: Path, **nightly: Any) -> Path:
    """A recipe of SFT alone that learns a family in seconds."""
    test = questions(folder / "held", "test.jsonl", named("t", 12), range(6))
    dev = questions(folder / "held", "dev.jsonl", named("d", 2), range(6))
    settings = {"inbox": str(folder / "inbox"), **nightly}
    path = folder / "farms.yaml"
    path.write_text(
        f"""
title: farms
stages: [data, synthesize, filter, gold_schema, sft, evaluate]
include: [models/tiny]
model: {{tiny: {{width: 64, layers: 2, heads: 2, ffn: 128}}}}
protocol: {{name: react, prompt: brief, max_turns: 2, max_turns_eval: 2, observation_rows: 4, cell_chars: 16}}
execution: {{timeout_s: 5, max_rows: 100, memory_mb: 512, equality: strict}}
synthesis: {{samples: 1, teacher: {{kind: oracle, error_rate: 0.0}}}}
filter: {{keep: null, per_example: 1}}
data:
  sft: {{kind: jsonl, path: {base}}}
  rl: [{{kind: jsonl, path: {base}}}]
  dev: {{kind: jsonl, path: {dev}, split: dev}}
  test: {{kind: jsonl, path: {test}, split: test}}
sft:
  batch: 8
  micro_batch: 8
  epochs: 20
  max_tokens: 512
  optimizer: {{kind: muon, lr: 0.02, lr_rest: 3e-3, weight_decay: 0.0, warmup_ratio: 0.05, schedule: linear}}
  save_steps: 1000
evaluation: {{samples: 1, ks: [1], sampling: {{temperature: 1.0, turn_tokens: 64, episode_tokens: 256}}}}
rollout: {{policy: transformers, slots: 64, processes: 1, shard: 120}}
hardware: {{device: cpu, threads: 1}}
nightly: {json.dumps(settings)}
""",
        encoding="utf-8",
    )
    return path
