"""The cards of an export: a model, its prompt and protocol, its recipe, its figures; and its demonstrations.

They hold settings, counts and figures, but no question, query, value or name of a part of a database, and no path or
address of the machine that trained it.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core import provenance
from pipelines.core.errors import DataError
from pipelines.core.files import folder_names, read_json
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import Action, ActionKind, ExecutionResult, ExecutionStatus, from_dict
from pipelines.curation.card import LICENCES, UNKNOWN
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.summary import Summary
from pipelines.protocols.base import Protocol, build_protocol
from pipelines.recipe.checkpoint import CheckpointCard, read_card, require_sound
from pipelines.recipe.yaml_files import yaml_text
from pipelines.report.formats import markdown_row
from pipelines.rollout.gguf_model import is_gguf

# The records of a store about a checkpoint: the stages that made it, and the evaluations of it.

QUESTIONS_CARD = "card.md"  # the filter stage's card of its demonstrations


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of a checkpoint."""

    benchmark: str  # reader and split of its questions: "spider, dev"
    summary: Summary


@dataclass(frozen=True)
class Lineage:
    """A checkpoint and its origin."""

    folder: Path  # the folder with the weights.
    adapter: Path | None  # the low-rank adapters that were merged into them; None if all weights were trained.
    card: CheckpointCard | None  # how it is prompted.
    # manifests of the stages that made it, by kind, its own among them; {} for a folder that no stage made.
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the counts of those stages, by kind.
    evaluations: tuple[Evaluated, ...] = ()  # this checkpoint's evaluations in the store.
    unread: int = 0  # damaged evaluations in the store, whichever checkpoint of the stage they were of.
    demonstrations: str = ""  # the card of its demonstrations; "" if there is none.

    def setting(self, path: str) -> Any:
        """The recipe's value at a path that one of the stages reads as a whole; None if no stage does."""
        for manifest in self.manifests.values():
            settings = manifest.get("recipe", {})
            if path in settings:
                return settings[path]
        return None


def lineage_of(folder: Path) -> Lineage:
    """The origin and the figures of a checkpoint's folder, as far as its store has them."""
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a checkpoint folder that holds a config.json.")
    require_sound(folder)
    folder = folder.resolve()  # `.`, or a link, is the same checkpoint
    card = read_card(folder)
    stage_folder = folder.parent
    adapter = None
    if (stage_folder / "adapter" / "adapter_config.json").is_file():
        adapter = stage_folder / "adapter"
    if not (stage_folder / MANIFEST).is_file() or folder.name != "model":
        return Lineage(folder, None, card)
    store = Store(stage_folder.parent.parent)
    stage = stage_folder.parent.name
    key = stage_folder.name
    folders = {}
    manifests = {}
    metrics = {}
    for kind, stage_key in _stages_behind(store, stage, key).items():
        folders[kind] = store.folder(kind, stage_key)
        manifests[kind] = store.manifest(kind, stage_key)
        metrics[kind] = read_json(folders[kind] / "metrics.json")
    evaluations, unread = _evaluations_of(store, stage, key)
    demonstrations = ""
    if "filter" in folders:
        questions_card = folders["filter"] / QUESTIONS_CARD
        if questions_card.is_file():
            demonstrations = questions_card.read_text(encoding="utf-8")
    return Lineage(
        folder=folder,
        adapter=adapter,
        card=card,
        manifests=manifests,
        metrics=metrics,
        evaluations=tuple(evaluations),
        unread=unread,
        demonstrations=demonstrations,
    )


def _stages_behind(store: Store, stage: str, key: str) -> dict[str, str]:
    """The stages behind one that the store still has, itself first: kind -> key; of two of a kind the nearest."""
    keys: dict[str, str] = {}
    waiting = [(stage, key)]
    while waiting:
        kind, input_key = waiting.pop(0)
        if kind not in keys and store.has(kind, input_key):
            keys[kind] = input_key
            waiting += store.manifest(kind, input_key).get("inputs", {}).items()
    return keys


def _evaluations_of(store: Store, stage: str, key: str) -> tuple[list[Evaluated], int]:
    """The finished evaluations of a checkpoint, and the number of those that are damaged."""
    kind = f"evaluate_{stage}"
    evaluations = []
    unread = 0
    for evaluation_key in folder_names(store.root / kind):
        if not store.has(kind, evaluation_key):
            continue
        try:
            inputs = store.manifest(kind, evaluation_key).get("inputs", {})
            if inputs.get(stage) != key:
                continue
            recipe = {}
            if "test" in inputs:
                recipe = store.manifest("test", inputs["test"])["recipe"]
            values = read_json(store.folder(kind, evaluation_key) / "summary.json")
            summary = from_dict(Summary, values)
            benchmark = f"{recipe.get('benchmark.kind')}, {recipe.get('benchmark.split')}"
            evaluations.append(Evaluated(benchmark, summary))
        except DataError:
            unread += 1
    return evaluations, unread


LOCAL = "a local checkpoint"
SETTINGS = ("model", "sft", "grpo", "rewards", "difficulty", "filter", "seed")  # sections of a recipe that a card has
POOLS = ("sft", "rl", "dev")
QUERIES = (ActionKind.SQL, ActionKind.EXPLORE, ActionKind.GENERATE)
ONE_TURN = Path(__file__).with_name("one_turn.txt")
LIMITS = (
    "Its SQL must run in a sandbox that only reads: nothing in the weights keeps it from writing any other statement. "
    "The weights were trained on questions, queries and results of the databases named by the licence above, and "
    "whoever has the weights may make them say parts of those."
)


def base_name(lineage: Lineage) -> str | None:
    """The hub name of the model that training began with; None for a path of one machine or one made from scratch."""
    settings = lineage.setting("model") or {}
    source = str(settings.get("source"))
    # Files that were read to make a key: the base model's, also of a synthesis by the model itself.
    was_local = any(manifest.get("weights") is not None for manifest in lineage.manifests.values())
    looks_like_name = source.count("/") == 1 and source[0].isalnum()
    if not looks_like_name or was_local or Path(source).expanduser().exists():
        return None
    return source


def model_card(lineage: Lineage, name: str, kind: str) -> str:
    """The README of an export of whole weights ("model") or of low-rank adapters ("adapter"), with hub metadata."""
    metadata = yaml_text(_hub_metadata(lineage, name, kind))
    terms = "\n".join(_terms(lineage))
    makers = "\n".join(_makers(lineage))
    paragraphs = [f"---\n{metadata}---", f"# {name}", _introduction(lineage)]
    if lineage.card is not None:
        paragraphs += _prompting(lineage.card, name)
    paragraphs.append(_recipe_section(lineage))
    paragraphs += question_counts(lineage)
    paragraphs += _figures(lineage)
    paragraphs.append(f"## Licence\n\n{terms}")
    paragraphs.append(f"## Limits\n\n{LIMITS}")
    paragraphs.append(f"## Made by\n\n{makers}")
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _hub_metadata(lineage: Lineage, name: str, kind: str) -> dict[str, Any]:
    """The head of a card, which the hub reads."""
    library = "peft" if kind == "adapter" else "transformers"
    metadata: dict[str, Any] = {
        "license": "other",
        "license_name": "see-the-card",
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["text-to-sql", "agent", "sqltrain"],
    }
    base = base_name(lineage)
    if base is not None:
        metadata["base_model"] = base
    results = []
    for evaluation in lineage.evaluations:
        metrics = []
        for equality, ex in evaluation.summary.ex.items():
            value = round(100 * ex.value, 2)
            metrics.append({"type": "execution_accuracy", "name": f"EX ({equality})", "value": value})
        if metrics:
            result = {
                "task": {"type": "text-generation", "name": "text-to-SQL"},
                "dataset": {"type": "text-to-sql", "name": evaluation.benchmark},
                "metrics": metrics,
            }
            results.append(result)
    if results:
        metadata["model-index"] = [{"name": name, "results": results}]
    return metadata


def _model_settings(lineage: Lineage) -> dict[str, Any]:
    """The recipe's section `model`, without a path of one machine."""
    model = dict(lineage.setting("model") or {})
    source = model.get("source")
    if source in (None, "tiny") or base_name(lineage) is not None:
        return model
    model["source"] = LOCAL
    if is_gguf(str(source)):
        file = Path(str(source))
        model["source"] = f"the GGUF file {file.name}"
    return model


def _introduction(lineage: Lineage) -> str:
    base = base_name(lineage)
    source = _model_settings(lineage).get("source", LOCAL)
    if base is not None:
        source = f"`{base}`"
    elif source == "tiny":
        source = "a small model made from scratch"
    made_by = ""
    if lineage.card is not None:
        made_by = f" with the recipe `{lineage.card.recipe}`, after its stage `{lineage.card.stage}`"
    return (
        "An agent that answers questions about a database in SQL, over several turns in which it runs queries and "
        f"reads their results. Post-trained by sqltrain{made_by}, from {source}."
    )


def _recipe_section(lineage: Lineage) -> str:
    """The settings of the stages that made it; "" for a folder that no stage made."""
    settings = {}
    for section in SETTINGS:
        value = lineage.setting(section)
        if value is not None:
            settings[section] = value
    if not settings:
        return ""
    if "model" in settings:
        settings["model"] = _model_settings(lineage)
    text = yaml_text(settings, width=100).rstrip()
    code_block = _code_block(text, "yaml")
    return f"## Recipe\n\nThe settings of the stages that made it:\n\n{code_block}"


def _figures(lineage: Lineage) -> Iterator[str]:
    """The paragraphs on its evaluations."""
    if lineage.evaluations or lineage.unread:
        about = "Execution accuracy of greedy answers to held-out questions, with its 95 % interval."
        yield f"## Figures\n\n{about}"
    if lineage.unread:
        yield f"Evaluations that are damaged, and so may be missing here: {lineage.unread}."
    for evaluation in lineage.evaluations:
        summary = evaluation.summary
        rows = []
        for equality, ex in summary.ex.items():
            rows.append((f"all, equality `{equality}`", _accuracy_in_words(ex)))
        for level in summary.by_hardness:
            if level.ex is not None:
                rows.append((level.name, _accuracy_in_words(level.ex)))
        n_left_out = sum(summary.left_out.values())
        rows.append(("questions that could not be asked", str(n_left_out)))
        yield _markdown_table((evaluation.benchmark, "EX"), rows)


def _accuracy_in_words(ex: Estimate) -> str:
    low = 100 * ex.low
    high = 100 * ex.high
    percent = 100 * ex.value
    sample = f"{ex.n:,} questions, {ex.n_clusters:,} databases, {ex.method}"
    return f"{percent:.1f} % ({low:.1f} to {high:.1f}; {sample})"


def _terms(lineage: Lineage) -> list[str]:
    """The licences of its weights and of the data that it learned from."""
    terms = []
    if lineage.manifests:
        base = base_name(lineage)
        if base is not None:
            terms.append(f"- weights: the licence of `{base}` holds")
        else:
            terms.append("- weights: yours, within the data's terms")
    readers: set[str] = set()
    for pool in POOLS:
        readers.update(str(source["kind"]) for source in _sources(lineage, pool))
    for reader in sorted(readers):
        licence = LICENCES.get(reader, UNKNOWN)
        terms.append(f"- questions and databases, {reader}: {licence}")
    if not readers:
        terms.append(f"- {UNKNOWN}")
    return terms


def _makers(lineage: Lineage) -> list[str]:
    """The programs and the machine that made it."""
    version = importlib.metadata.version("sqltrain")
    lines = [f"- sqltrain {version}"]
    if lineage.manifests:
        own_manifest = next(iter(lineage.manifests.values()))
        tags = provenance.as_tags(own_manifest.get("made_by", {}))
        lines += [f"- {name}: {text}" for name, text in tags.items()]
    return lines


def _prompting(card: CheckpointCard, name: str) -> Iterator[str]:
    """The prompt, the tool protocol, and code that has one turn."""
    protocol = build_protocol(card.protocol)
    yield "## How it is asked"
    for role, text in protocol.read_prompt().items():
        about = f"The {role} message (`$schema`, `$question` and other words with a `$` are put in):"
        template = _code_block(text.template.rstrip())
        yield f"{about}\n\n{template}"
    yield _protocol_table(card, protocol)
    result = _example_result(protocol)
    if result is not None:
        yield f"A result goes back as a user message, with the conversation so far before it:\n\n{_code_block(result)}"
    code_template = ONE_TURN.read_text(encoding="utf-8")
    code = code_template.format(folder=name, stop=list(protocol.stop), tokens=card.sampling.turn_tokens)
    code_block = _code_block(code.rstrip(), "python")
    yield f"One turn, with transformers alone:\n\n{code_block}"
    yield "`sqltrain serve DATABASE --model FOLDER` runs the whole agent: prompt, sandbox, turns and limits as above."


def _protocol_table(card: CheckpointCard, protocol: Protocol) -> str:
    settings = card.protocol
    turns = f"{settings.max_turns_eval}"
    if settings.forced_final:
        turns += ", the last one an answer"
    failed_answer = "ends the episode"
    if settings.returns_failed_answers:
        failed_answer = "comes back with its error while turns are left"
    characters = "any number"
    if settings.observation_chars is not None:
        characters = f"{settings.observation_chars:,}"
    rows = [
        ("tags that it writes", _code_words(f"<{tag}>" for tag in protocol.agent)),
        ("tags that the database's side writes", _code_words(f"<{tag}>" for tag in protocol.environment)),
        ("what ends its turn", _code_words(protocol.stop)),
        ("turns at most", turns),
        ("an answer that does not run", failed_answer),
        ("schema in the prompt", f"{settings.schema_view}, {settings.schema_values} example values a column"),
        ("rows and characters of a result", f"{settings.observation_rows}, {characters}"),
        ("tokens of a turn and of all", f"{card.sampling.turn_tokens:,}, {card.sampling.episode_tokens:,}"),
    ]
    return _markdown_table(("protocol", f"`{settings.name}`, prompt `{settings.prompt}`"), rows)


def _code_words(texts: Iterable[str]) -> str:
    return " ".join(f"`{text}`" for text in texts)


def _example_result(protocol: Protocol) -> str | None:
    """A result of one made-up row, as the model reads it; None for a protocol that runs no queries."""
    for kind in QUERIES:
        query = Action(kind, "SELECT name, price FROM product")
        if protocol.query(query) is not None:
            result = ExecutionResult(ExecutionStatus.OK, ("name", "price"), (("pen", 3),))
            return protocol.observe(query, result, 2)
    return None


def question_counts(lineage: Lineage) -> Iterator[str]:
    """The paragraphs on the questions that it was trained with; none if its recipe names no source."""
    counts = lineage.metrics.get("data", {})
    rows = []
    for pool in POOLS:
        sources = _sources(lineage, pool)
        if not sources:
            continue
        names = dict.fromkeys(f"{source['kind']} ({source['split']})" for source in sources)
        readers = " and ".join(names)
        count = counts.get(f"{pool}_examples")
        number = "an unknown number of" if count is None else f"{count:,.0f}"
        rows.append((pool, f"{readers}, {number} questions"))
    if rows:
        table = _markdown_table(("pool", "questions"), rows)
        yield f"## Data\n\n{table}"
        yield "What demonstrations it was shown is in `dataset/README.md`."


def _sources(lineage: Lineage, pool: str) -> list[Mapping[str, Any]]:
    value = lineage.setting(f"data.{pool}") or []
    if isinstance(value, list):
        return value
    return [value]


def _markdown_table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = []
    for row in (head, ("---", "---"), *rows):
        escaped = [text.replace("|", "\\|") for text in row]
        lines.append(markdown_row(escaped))
    return "\n".join(lines)


def _code_block(text: str, language: str = "") -> str:
    return f"````{language}\n{text}\n````"
