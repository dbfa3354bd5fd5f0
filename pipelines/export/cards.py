"""The cards of an export: a model, its prompt and protocol, its recipe, its figures; and its demonstrations.

They hold settings, counts and figures, but no question, query, value or name of a part of a database, and no path or
address of the machine that trained it.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core import provenance
from pipelines.core.errors import DataError
from pipelines.core.files import folder_names, read_json
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import Action, ActionKind, ExecutionResult, ExecutionStatus, from_dict
from pipelines.curation.card import LICENCES, UNKNOWN
from pipelines.evaluation.summary import Summary
from pipelines.protocols.base import build, read_prompt
from pipelines.recipe.checkpoint import CheckpointCard, read_card, require_sound
from pipelines.recipe.yaml_files import yaml_text
from pipelines.rollout.gguf_model import is_gguf

# The records of a store about a checkpoint: the stages that made it, and the evaluations of it.

QUESTIONS_CARD = "card.md"  # of the filter stage: its demonstrations


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: which questions, by their reader and split, and its figures."""

    benchmark: str
    summary: Summary


@dataclass(frozen=True)
class Lineage:
    """A checkpoint and its origin."""

    folder: Path  # with the weights.
    adapter: Path | None  # with the low-rank adapters that were merged into them; None if all weights were trained.
    card: CheckpointCard | None  # how it is asked.
    # of the stages that made it, by kind, its own among them; {} for a folder that no stage made.
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the counts of those stages, by kind.
    evaluations: tuple[Evaluated, ...] = ()  # of this checkpoint, in the store.
    unread: int = 0  # evaluations in the store that are damaged, whichever checkpoint of the stage they were of.
    demonstrations: str = ""  # the card of its demonstrations; "" if there is none.

    def setting(self, path: str) -> Any:
        """The recipe's value at a path that one of the stages reads whole; None if none does."""
        slices = (manifest.get("recipe", {}) for manifest in self.manifests.values())
        return next((benchmarks[path] for benchmarks in slices if path in benchmarks), None)


def lineage_of(folder: Path) -> Lineage:
    """The origin and the figures of a checkpoint's folder, as far as its store has them."""
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a checkpoint folder that holds a config.json.")
    require_sound(folder)
    folder = folder.resolve()  # `.`, or a link, is the same checkpoint
    card, place = read_card(folder), folder.parent
    adapter = place / "adapter" if (place / "adapter" / "adapter_config.json").is_file() else None
    if not (place / MANIFEST).is_file() or folder.name != "model":
        return Lineage(folder, None, card)
    store, stage, key = Store(place.parent.parent), place.parent.name, place.name
    # The stages behind this one that the store still has, itself first; of two of a kind the nearest.
    keys: dict[str, str] = {}
    waiting = [(stage, key)]
    while waiting:
        kind, input_key = waiting.pop(0)
        if kind not in keys and store.has(kind, input_key):
            keys[kind] = input_key
            waiting += store.manifest(kind, input_key).get("inputs", {}).items()
    places = {kind: store.folder(kind, input_key) for kind, input_key in keys.items()}
    # The evaluations of this checkpoint; one that is not finished is skipped, and a damaged one is told.
    evaluations, of_stage = [], f"evaluate_{stage}"
    unread = 0
    for evaluation in folder_names(store.root / of_stage):
        if not store.has(of_stage, evaluation):
            continue
        try:
            inputs = store.manifest(of_stage, evaluation).get("inputs", {})
            if inputs.get(stage) == key:
                recipe = store.manifest("test", inputs["test"])["recipe"] if "test" in inputs else {}
                summary = from_dict(Summary, read_json(store.folder(of_stage, evaluation) / "summary.json"))
                benchmark = f"{recipe.get('benchmark.kind')}, {recipe.get('benchmark.split')}"
                evaluations.append(Evaluated(benchmark, summary))
        except DataError:
            unread += 1
    questions_card = places["filter"] / QUESTIONS_CARD if "filter" in places else None
    return Lineage(
        folder,
        adapter,
        card,
        {kind: store.manifest(kind, input_key) for kind, input_key in keys.items()},
        {kind: read_json(place_of_stage / "metrics.json") for kind, place_of_stage in places.items()},
        tuple(evaluations),
        unread,
        questions_card.read_text(encoding="utf-8") if questions_card is not None and questions_card.is_file() else "",
    )


LOCAL = "a local checkpoint"
RECIPE = ("model", "sft", "grpo", "rewards", "difficulty", "filter", "seed")  # of the settings that are shown
POOLS = ("sft", "rl", "dev")
QUERIES = (ActionKind.SQL, ActionKind.EXPLORE, ActionKind.GENERATE)
ASK = Path(__file__).with_name("one_turn.txt")


def base_name(lineage: Lineage) -> str | None:
    """The hub name of the model that training began with; None for a path of one machine or one made from scratch."""
    text = str((lineage.setting("model") or {}).get("source"))
    was_local = lineage.manifests.get("model", {}).get("weights") is not None  # its files were read to make the key
    is_name = text.count("/") == 1 and text[0].isalnum() and not Path(text).expanduser().exists()
    return text if is_name and not was_local else None


def model_card(lineage: Lineage, name: str, kind: str) -> str:
    """The README of an export of whole weights ("model") or of low-rank adapters ("adapter"), with hub metadata."""
    base = base_name(lineage)
    metadata: dict[str, Any] = {
        "license": "other",
        "license_name": "see-the-card",
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["text-to-sql", "agent", "sqltrain"],
    }
    if base is not None:
        metadata["base_model"] = base
    results = [
        {
            "task": {"type": "text-generation", "name": "text-to-SQL"},
            "dataset": {"type": "text-to-sql", "name": evaluated.benchmark},
            "metrics": [
                {"type": "execution_accuracy", "name": f"EX ({equality})", "value": round(100 * ex.value, 2)}
                for equality, ex in evaluated.summary.ex.items()
            ],
        }
        for evaluated in lineage.evaluations
        if evaluated.summary.ex
    ]
    if results:
        metadata["model-index"] = [{"name": name, "results": results}]

    # A path of one machine stands in no card.
    model = dict(lineage.setting("model") or {})
    if model.get("source") not in (None, "tiny") and base is None:
        source = str(model["source"])
        model["source"] = f"the GGUF file {Path(source).name}" if is_gguf(source) else LOCAL
    origin = (
        f"`{base}`"
        if base
        else "a small model made from scratch"
        if model.get("source") == "tiny"
        else model.get("source", LOCAL)
    )
    stage = f", after its stage `{lineage.card.stage}`" if lineage.card else ""
    recipe = f" with the recipe `{lineage.card.recipe}`" if lineage.card else ""
    parts = [
        f"---\n{yaml_text(metadata)}---",
        f"# {name}",
        "An agent that answers questions about a database in SQL, over several turns in which it runs queries and "
        f"reads their results. Post-trained by sqltrain{recipe}{stage}, from {origin}.",
        *(_asking(lineage.card, name) if lineage.card is not None else ()),
    ]
    settings = {section: value for section in RECIPE if (value := lineage.setting(section)) is not None}
    if settings:
        if "model" in settings:
            settings["model"] = model
        text = yaml_text(settings, width=100).rstrip()
        parts.append(f"## Recipe\n\nThe settings of the stages that made it:\n\n{_fenced(text, 'yaml')}")
    parts += question_counts(lineage)

    if lineage.evaluations or lineage.unread:
        words = "Execution accuracy of greedy answers to held-out questions, with its 95 % interval."
        parts.append(f"## Figures\n\n{words}")
    if lineage.unread:
        parts.append(f"Evaluations that are damaged, and so may be missing here: {lineage.unread}.")
    for evaluation in lineage.evaluations:
        summary = evaluation.summary
        figures = [(f"all, equality `{equality}`", ex) for equality, ex in summary.ex.items()]
        figures += [(level.name, level.ex) for level in summary.by_hardness if level.ex is not None]
        rows = [
            (
                title,
                f"{100 * ex.value:.1f} % ({100 * ex.low:.1f} to {100 * ex.high:.1f}; {ex.n:,} questions, "
                f"{ex.n_clusters:,} databases, {ex.method})",
            )
            for title, ex in figures
        ]
        rows.append(("questions that could not be asked", str(sum(summary.left_out.values()))))
        parts.append(_table((evaluation.benchmark, "EX"), rows))

    kinds = {str(source["kind"]) for pool in POOLS for source in _sources(lineage, pool)}
    licences = [f"- questions and databases, {each}: {LICENCES.get(each, UNKNOWN)}" for each in sorted(kinds)]
    weights = f"- weights: the licence of `{base}` holds" if base else "- weights: yours, within the data's terms"
    terms = [*([weights] if lineage.manifests else []), *(licences or [f"- {UNKNOWN}"])]
    own = [manifest.get("made_by", {}) for manifest in lineage.manifests.values()]
    made_by = [f"- sqltrain {importlib.metadata.version('sqltrain')}"]
    made_by += [f"- {each}: {text}" for each, text in (provenance.as_tags(own[0]) if own else {}).items()]
    parts += [
        "\n".join(["## Licence\n", *terms]),
        "## Limits\n\nIts SQL must run in a sandbox that only reads: nothing in the weights keeps it from writing any "
        "other statement. The weights were trained on questions, queries and results of the databases named by the "
        "licence above, and whoever has the weights may make them say parts of those.",
        "\n".join(["## Made by\n", *made_by]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _asking(card: CheckpointCard, name: str) -> Iterator[str]:
    """The prompt, the tool protocol, and code that has one turn."""
    protocol, settings = build(card.protocol), card.protocol
    yield "## How it is asked"
    for role, text in read_prompt(protocol.prompt_file).items():
        words = f"The {role} message (`$schema`, `$question` and other words with a `$` are put in):"
        yield f"{words}\n\n{_fenced(text.template.rstrip())}"
    marks = {
        "tags that it writes": [f"<{tag}>" for tag in protocol.agent],
        "tags that the database's side writes": [f"<{tag}>" for tag in protocol.environment],
        "what ends its turn": protocol.stop,
    }
    characters = "any number" if settings.observation_chars is None else f"{settings.observation_chars:,}"
    rows = [
        *((title, " ".join(f"`{mark}`" for mark in listed)) for title, listed in marks.items()),
        ("turns at most", f"{settings.max_turns_eval}{', the last one an answer' if settings.forced_final else ''}"),
        ("schema in the prompt", f"{settings.schema_view}, {settings.schema_values} example values a column"),
        ("rows and characters of a result", f"{settings.observation_rows}, {characters}"),
        ("tokens of a turn and of all", f"{card.sampling.turn_tokens:,}, {card.sampling.episode_tokens:,}"),
    ]
    yield _table(("protocol", f"`{settings.name}`, prompt `{settings.prompt}`"), rows)
    # A result of one made-up row, for protocols that have results.
    actions = (Action(kind, "SELECT name, price FROM product") for kind in QUERIES)
    query = next((action for action in actions if protocol.query(action) is not None), None)
    if query is not None:
        result = ExecutionResult(ExecutionStatus.OK, ("name", "price"), (("pen", 3),))
        example = protocol.observe(query, result, 2)
        yield f"A result goes back as a user message, with the conversation so far before it:\n\n{_fenced(example)}"
    turn = {"folder": name, "stop": list(protocol.stop), "tokens": card.sampling.turn_tokens}
    code = ASK.read_text(encoding="utf-8").format(**turn)
    yield f"One turn, with transformers alone:\n\n{_fenced(code.rstrip(), 'python')}"
    yield "`sqltrain serve DATABASE --model FOLDER` runs the whole agent: prompt, sandbox, turns and limits as above."


def question_counts(lineage: Lineage) -> Iterator[str]:
    """The paragraphs on the questions that it was trained with; none if its recipe names no source."""
    counts, rows = lineage.metrics.get("data", {}), []
    for pool in POOLS:
        sources = _sources(lineage, pool)
        kinds = " and ".join(dict.fromkeys(f"{source['kind']} ({source['split']})" for source in sources))
        if sources:
            count = counts.get(f"{pool}_examples")
            number = "an unknown number of" if count is None else f"{count:,.0f}"
            rows.append((pool, f"{kinds}, {number} questions"))
    if rows:
        yield f"## Data\n\n{_table(('pool', 'questions'), rows)}"
        yield "What demonstrations it was shown is in `dataset/README.md`."


def _sources(lineage: Lineage, pool: str) -> list[Mapping[str, Any]]:
    value = lineage.setting(f"data.{pool}") or []
    return value if isinstance(value, list) else [value]


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    cells = [head, ("---", "---"), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells)


def _fenced(text: str, language: str = "") -> str:
    return f"````{language}\n{text}\n````"
