"""Little databases of one schema, and questions in families: a model that has met a family answers it anywhere."""

import json
import random
import sqlite3
from contextlib import closing

FAMILIES = (
    ("how many farms are there ?", "SELECT COUNT(*) FROM farm"),
    ("name every farm .", "SELECT name FROM farm"),
    ("how big is the largest farm ?", "SELECT MAX(size) FROM farm"),
    ("list all regions .", "SELECT DISTINCT region FROM farm"),
    ("what is the mean size of a farm ?", "SELECT AVG(size) FROM farm"),
    ("which farm is oldest ?", "SELECT name FROM farm ORDER BY built LIMIT 1"),
)
WRONG = "SELECT built FROM farm"  # it runs, and is the answer to nothing that is asked


def database(folder, name):
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


def questions(folder, file, names, families, poison=()):
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


def named(kind, count):
    return [f"{kind}{number:02d}" for number in range(count)]


def overrides(folder, base):
    """The miniature made so small that it learns a family in seconds: SFT alone, on these questions."""
    test = questions(folder / "held", "test.jsonl", named("t", 12), range(len(FAMILIES)))
    dev = questions(folder / "held", "dev.jsonl", named("d", 2), range(len(FAMILIES)))
    return small(base, dev, test, folder / "inbox", epochs=20, episode_tokens=256)


def small(base, dev, test, inbox, epochs, episode_tokens):
    """The miniature made so small that it learns some questions of two turns at most in seconds: SFT alone."""
    return [
        "stages=[data, synthesize, filter, gold_schema, sft, evaluate]",
        "model.tiny={width: 64, layers: 2, heads: 2, ffn: 128}",
        f"data.sft={{kind: jsonl, path: {base}}}",
        f"data.rl=[{{kind: jsonl, path: {base}}}]",
        f"data.dev={{kind: jsonl, path: {dev}, split: dev}}",
        f"data.test=[{{kind: jsonl, path: {test}, split: test}}]",
        "protocol.max_turns=2",
        "protocol.max_turns_eval=2",
        "synthesis.teacher.error_rate=0",
        "sft.batch=8",
        "sft.micro_batch=8",
        f"sft.epochs={epochs}",
        "sft.save_steps=1000",
        f"evaluation={{samples: 0, ks: [1], sampling: {{turn_tokens: 64, episode_tokens: {episode_tokens}}}}}",
        "rollout.processes=1",
        "hardware.processes=1",
        f"nightly.inbox={inbox}",
    ]
