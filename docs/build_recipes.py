"""Writes docs/reference/recipes.md and the papers' pages from the recipe files: `python docs/build_recipes.py`."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed copy

from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.deviations import PAPERS

PAGE = Path(__file__).resolve().parent / "reference" / "recipes.md"
PAPER_PAGES = PAGE.parent / "papers"
MARKS = ("<!-- recipe: begin -->", "<!-- recipe: end -->")
# Each row of the tables: what it is, and the key that holds it. A stage that a recipe leaves out shows a dash.
FACTS: dict[str, tuple[tuple[str, str], ...]] = {
    "Model": (("base model", "model.source"),),
    "Interaction": (
        ("protocol", "protocol.name"),
        ("schema in the prompt", "protocol.schema_view"),
        ("example values a column", "protocol.schema_values"),
        ("stored values that the question names", "data.values"),
        ("descriptions of columns", "protocol.schema_descriptions"),
        ("turn cap in training", "protocol.max_turns"),
        ("turn cap in evaluation", "protocol.max_turns_eval"),
        ("rows of an observation", "protocol.observation_rows"),
        ("characters of its cells", "protocol.cell_chars"),
        ("characters of all of it", "protocol.observation_chars"),
        ("reasoning in every turn", "protocol.reasoning"),
        ("what makes a turn malformed", "protocol.format"),
        ("one forced final answer", "protocol.forced_final"),
        ("the protocol's own options", "protocol.options"),
    ),
    "SFT": (
        ("questions", "data.sft"),
        ("trajectories a question", "synthesis.samples"),
        ("tokens of a teacher's turn", "synthesis.teacher.sampling.turn_tokens"),
        ("trajectories kept", "filter.keep"),
        ("kept a question", "filter.per_example"),
        ("levels kept first, where not all are kept", "filter.priority"),
        ("batch", "sft.batch"),
        ("epochs", "sft.epochs"),
        ("rate", "sft.optimizer.lr"),
        ("betas", "sft.optimizer.betas"),
        ("weight decay", "sft.optimizer.weight_decay"),
        ("warm-up", "sft.optimizer.warmup_ratio"),
        ("gradient clip", "sft.optimizer.clip"),
        ("schedule", "sft.optimizer.schedule"),
    ),
    "RL data": (
        ("pools", "data.rl"),
        ("empty gold results left out", "data.drop_empty"),
        ("rollouts for pass@G", "difficulty.group"),
        ("candidates", "difficulty.candidates"),
        ("kept by S(q)", "difficulty.keep"),
        ("exploration set", "difficulty.explore"),
        ("its parts", "difficulty.explore_parts"),
        ("pass rate below (all: no bound)", "difficulty.max_pass"),
        ("tokens of a turn", "difficulty.sampling.turn_tokens"),
    ),
    "Reward": (("panel", "rewards"),),
    "GRPO": (
        ("group G", "grpo.group"),
        ("questions a step", "grpo.questions_per_step"),
        ("optimiser steps a rollout", "grpo.updates_per_rollout"),
        ("generations sampled ahead", "grpo.staleness"),
        ("epochs (all: counted by steps)", "grpo.epochs"),
        ("steps, where no epochs are set", "grpo.steps"),
        ("clip below", "grpo.clip_low"),
        ("clip above", "grpo.clip_high"),
        ("KL coefficient", "grpo.beta"),
        ("advantage divided by", "grpo.scale"),
        ("loss (TRL)", "grpo.loss"),
        ("ratio per", "grpo.level"),
        ("lambda of the schema track", "grpo.lambda_schema"),
        ("rollouts dropped", "grpo.drop"),
        ("temperature", "grpo.sampling.temperature"),
        ("top-p", "grpo.sampling.top_p"),
        ("tokens of a turn", "grpo.sampling.turn_tokens"),
        ("tokens of an episode", "grpo.sampling.episode_tokens"),
        ("rate", "grpo.optimizer.lr"),
        ("schedule", "grpo.optimizer.schedule"),
        ("warm-up", "grpo.optimizer.warmup_ratio"),
    ),
    "Evaluation": (
        ("questions while training", "data.dev"),
        ("held-out questions; others by include=data/NAME", "data.test"),
        ("sampled episodes", "evaluation.samples"),
        ("k of pass@k and majority@k", "evaluation.ks"),
        ("temperature of the sampled", "evaluation.sampling.temperature"),
        ("tokens of a turn", "evaluation.sampling.turn_tokens"),
        ("also forced to answer at once", "evaluation.forced_single_turn"),
        ("equalities", "evaluation.equalities"),
    ),
}
STAGE_OF = {"sft": "sft", "filter": "filter", "synthesis": "synthesize", "difficulty": "difficulty", "grpo": "grpo"}
INTRO = """# Recipes compared

This page is written by `python docs/build_recipes.py` from `conf/recipes/`; a test compares the two. The second column
is the key of each number: change it with `sqltrain run RECIPE KEY=VALUE`, or take a paper's ablation with
`variant=NAME`. A dash is a stage that neither the paper nor one of its ablations has.

| recipe | what it is |
|---|---|
| [`sql_trail`](papers/sql_trail.md) | SQL-Trail: many turns with SQL feedback; a reward for few turns |
| [`trust_sql`](papers/trust_sql.md) | TRUST-SQL: the schema is hidden: explore, propose, generate, confirm |
| [`reasoning_sql`](papers/reasoning_sql.md) | Reasoning-SQL: one turn; partial rewards, one of them from a judge |
| [`skyrl_sql`](papers/skyrl_sql.md) | SkyRL-SQL: many turns; one simple reward |
| [`mtir_sql`](papers/mtir_sql.md) | MTIR-SQL: tool calls; rollouts are filtered before the loss |
| `arctic_sql` | Arctic-Text2SQL-R1, from public descriptions: one turn and an execution reward |
| `revisql` | ReViSQL, from public descriptions: verified data, CISPO on adapters |
| `csc_sql` | CSC-SQL, from public descriptions: merge revision at inference |
| `sqltrain` | our cross-over of the five; its file's head names each source |
| `smollm2` | a small language model, also on two cores ([results](../results/real_model.md)) |
| `miniature` | the tiny model on the generated world |
| `mini_*` | the five papers and `sqltrain` at the scale `scales/miniature` ([results](../results/recipes.md)) |
| `laboratory`, `laboratory_unknown` | tests of the papers' [claims](../results/laboratory.md) |

[Deviations](deviations.md) lists every difference from a paper. A recipe of your own is a YAML file, run by its path:

```yaml
title: "Ours: SkyRL-SQL's reward under SQL-Trail's turns"
include: [recipes/sql_trail]          # files of conf/, without their suffix; later ones and this file win
data: {sft: {kind: jsonl, path: ~/questions.jsonl}}
rewards: [{term: skyrl}]
variants:
  wide: [grpo.group=16]               # sqltrain run mine.yaml variant=wide
```
"""


def page() -> str:
    """The whole page."""
    loaded = {name: recipes.load(name) for name in PAPERS}
    return "\n".join([INTRO, *_tables(loaded)])


def with_recipe(text: str, name: str) -> str:
    """A paper's page with what its recipe says between the marks."""
    begin, end = MARKS
    lines = "\n".join(_paper(name, recipes.load(name)))
    return f"{text.partition(begin)[0]}{begin}\n{lines}{end}{text.partition(end)[2]}"


def paper_page(name: str) -> Path:
    """The page of a paper."""
    return PAPER_PAGES / f"{name}.md"


def value_at(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key, as JSON values."""
    (value,) = recipe.slice(key).values()
    return value


def _tables(loaded: dict[str, Recipe]) -> Iterator[str]:
    for title, rows in FACTS.items():
        yield f"## {title}\n"
        yield "| | key | " + " | ".join(PAPERS.values()) + " |"
        yield "|---" * (len(PAPERS) + 2) + "|"
        for label, key in rows:
            cells = " | ".join(_cell(name, recipe, key) for name, recipe in loaded.items())
            yield f"| {label} | `{key}` | {cells} |"
        yield ""


def _cell(name: str, recipe: Recipe, key: str) -> str:
    stage = "sft" if key == "data.sft" else STAGE_OF.get(key.partition(".")[0])
    if stage and stage not in _stages(name):
        return "–"
    value = value_at(recipe, key)
    if key == "rewards":
        return "<br>".join(_term(term) for term in value)
    if key in ("data.rl", "data.test"):
        return "<br>".join(_source(source) for source in value)
    return _source(value) if key in ("data.sft", "data.dev") else _plain(value)


@functools.cache
def _stages(name: str) -> frozenset[str]:
    """The stages that a recipe or one of its variants has."""
    own = [recipes.load(name, [f"variant={variant}"]) for variant in recipes.variants(name)]
    return frozenset(stage for recipe in [recipes.load(name), *own] for stage in recipe.stages)


def _plain(value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "<br>".join(f"{name}: {_plain(item)}" for name, item in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _source(source: dict[str, Any]) -> str:
    parts = [source["kind"], source["split"], _plain(source["count"])]
    levels = source["hardness"] or source["options"].get("complexity") or []
    if isinstance(levels, dict):
        levels = [f"{count:,} {level}" for level, count in levels.items()]
    return " ".join(parts + ([f"({', '.join(levels)})"] if levels else []))


def _term(term: dict[str, Any]) -> str:
    options = ", ".join(f"{name} {_plain(value)}" for name, value in term["options"].items())
    track = " on the schema track" if term["track"] == "schema" else ""
    return f"{term['weight']:g} {term['term']}{f' ({options})' if options else ''}{track}"


def _paper(name: str, recipe: Recipe) -> Iterator[str]:
    yield "```text"
    yield from _head(name)
    yield "```\n"
    anchor = f"{PAPERS[name].lower()}-confrecipes{name}yaml"
    yield f"[Where it deviates from the paper](../deviations.md#{anchor}).\n"
    yield "The paper reports: " + ", ".join(f"{key} {value:g}" for key, value in recipe.reported.items()) + ".\n"
    yield "| variant | sets |"
    yield "|---|---|"
    for variant, overrides in recipes.variants(name).items():
        yield f"| `{variant}` | {'<br>'.join(f'`{_override(step)}`' for step in overrides)} |"
    yield ""


def _head(name: str) -> Iterator[str]:
    """The head of a recipe's file, up to the deviations, which have a page of their own."""
    for line in (recipes.CONF / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.startswith("# Deviates"):
            return
        yield line.removeprefix("#").removeprefix(" ").rstrip()


def _override(step: Any) -> str:
    return step if isinstance(step, str) else json.dumps(step)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for paper in PAPERS:
        before = paper_page(paper).read_text(encoding="utf-8")
        paper_page(paper).write_text(with_recipe(before, paper), encoding="utf-8")
