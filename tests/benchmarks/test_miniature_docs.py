"""The tables of docs/reference/miniature.md are what the code gives: running this file writes them anew."""

import collections
from pathlib import Path

from pipelines.benchmarks.miniature import world
from pipelines.benchmarks.miniature.questions import FAMILIES, templates
from pipelines.recipe.recipes import CONF
from pipelines.recipe.yaml_files import read_yaml

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "miniature.md"


def numbers():
    data = read_yaml(CONF / "data" / "miniature.yaml")["data"]
    pools = {"sft": data["sft"], "rl": data["rl"][0], "dev": data["dev"], "test": data["test"][0]}
    lines = [
        "| pool | databases | questions | table pairs held out | columns held out | wordings |",
        "|---|---|---|---|---|---|",
    ]
    for pool, source in pools.items():
        split, options = source["split"], source["options"]
        columns = sum(world.held_out_columns(table, split) is not None for table in world.KINDS) * 2
        wordings = sum(len(templates(family.name, split)) for family in FAMILIES)
        asked = options["databases"] * options["questions"]
        pairs = len(world.held_out_pairs(split))
        lines.append(f"| {pool} | {options['databases']} | {asked:,} | {pairs} | {columns} | {wordings:,} |")
    words = sum(map(len, world.CATEGORIES.values()))
    weights, total = world.TABLE_COUNTS, sum(world.TABLE_COUNTS.values())
    counts = ", ".join(f"{count} ({weight} in {total})" for count, weight in weights.items())
    lines += [
        "",
        f"{len(world.DOMAINS)} domains; {len(world.KINDS)} tables; {len(world.CATEGORIES)} categories with {words} "
        f"values in four forms; {len(world.MEASURES)} measures. A database has {counts} tables of {world.ROWS[0]} to "
        f"{world.ROWS[1]} rows.",
    ]
    return "\n".join(lines)


def families():
    total = sum(family.weight for family in FAMILIES)
    lines = ["| family | level | drawn | SQL |", "|---|---|---|---|"]
    for family in FAMILIES:
        lines.append(f"| {family.name} | {family.hardness} | {100 * family.weight / total:.1f} % | `{family.sql}` |")
    levels = collections.Counter()
    for family in FAMILIES:
        levels[family.hardness] += family.weight
    shares = ", ".join(f"{level} {100 * weight / total:.0f} %" for level, weight in levels.items())
    return "\n".join([*lines, "", f"By level, before the checks: {shares}."])


def page(text):
    for heading, content in (("The world in numbers", numbers()), ("The families", families())):
        start = text.index("|" if heading != "The families" else "| family", text.index(f"## {heading}"))
        end = text.index("\n## ", start)
        text = text[:start] + content + "\n" + text[end:]
    return text


def test_the_page_says_what_the_code_does():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "python tests/benchmarks/test_miniature_docs.py writes the tables anew"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
