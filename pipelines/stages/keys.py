"""What decides a stage's result and stands outside the recipe: files, weights, prompts, and models behind endpoints."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.prompt_schema import NO_ENDPOINT
from pipelines.core.errors import DataError, RecipeError, ResourceError
from pipelines.core.files import folder_names, read_json, sha256, write_atomic
from pipelines.core.registry import PROTOCOLS
from pipelines.core.store import MANIFEST, Store
from pipelines.databases import card, named
from pipelines.protocols.one_action import SCRIPTED, Ask
from pipelines.recipe.config import MERGE, ProtocolSection, Recipe, Source
from pipelines.recipe.recipes import digest
from pipelines.rewards.panel import RUBRIC, endpoint_of
from pipelines.rollout import gguf_model
from pipelines.sql.dialects.base import identity

CACHE = "digests.json"
SETTLED_S = 2.0  # a file changed later than that may change again within one tick of its file system's clock
ANSWER_FIELDS = {"model", "omit", "extra", "system", "reasoning"}  # of an endpoint: those that decide its answers
MISSING = "missing"


class Digests:
    """Digests of files, remembered in a store by (path, size, modification time): gigabytes are read once."""

    def __init__(self, store: Path | None) -> None:
        self._path = None if store is None else store / CACHE
        self._known: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        if self._path is not None:
            with contextlib.suppress(DataError):  # a damaged memory is none
                self._known = read_json(self._path)

    def of(self, path: Path) -> str:
        """The digest of a file's bytes; `MISSING` if there is none."""
        try:
            key, settled = self._key(path)
            value = self._known.get(key) or self._new.get(key)
            if value is None:
                value = sha256(path)
                if settled:
                    self._new[key] = value
        except (OSError, ValueError):  # not there, a folder, no file's name
            return MISSING
        return str(value)

    def files(self, source: Source, path: Path) -> list[Path]:
        """The files that a source's reader names, and the file itself; every file there if its module names none.

        Those of a single file, which may be long, are remembered too.
        """
        name, settled = "", False
        if path.is_file():
            key, settled = self._key(path)
            name = f"files|{digest([source.kind, source.options, source.corrections])}|{key}"
            if name in self._known:
                return [Path(file) for file in self._known[name]]
        own = base.files(source)
        files = sorted(set(walk(path) if own is None else own))
        if settled:
            self._new[name] = list(map(str, files))
        return files

    def save(self) -> None:
        """Keep what is new; a store that cannot be written is only read, so the files are read again the next time."""
        if self._new and self._path is not None:
            with contextlib.suppress(OSError, ResourceError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, json.dumps({**self._known, **self._new}, sort_keys=True))

    @staticmethod
    def _key(path: Path) -> tuple[str, bool]:
        facts = path.stat()
        return f"{path}|{facts.st_size}|{facts.st_mtime_ns}", time.time() - facts.st_mtime > SETTLED_S


def fingerprint(sources: Iterable[Source], store: Path) -> dict[str, str]:
    """For each path of some sources, a digest of the files there that their readers read; unrelated ones don't count.

    Links are followed. What a reader names and is not there counts, too: it may come.
    """
    digests = Digests(store)
    by_folder: dict[str, dict[str, str]] = {}
    for source in sources:
        if source.path:
            path = _path(source)
            files = digests.files(source, path)
            by_folder.setdefault(str(path), {}).update(
                {os.path.relpath(file, path): digests.of(file) for file in files}
            )
    digests.save()
    return {path: digest(files) for path, files in by_folder.items()}


def cards(sources: Sequence[Source], store: Path) -> dict[str, str]:
    """The digests of the cards that describe databases of some sources, by the databases' names; {} for no card."""
    described = card.by_database()
    if not described:
        return {}
    digests = Digests(store)
    places_named = {
        identity(str(file))
        for source in sources
        if source.path
        for path in [_path(source)]
        for file in digests.files(source, path)
    }
    digests.save()
    places = [identity(address) for source in sources for address in base.addresses(source)]
    servers = tuple(place for place in places if place.endswith("/"))
    places_named |= set(places)
    by_name: dict[str, list[str]] = {}
    for place, described_card in sorted(described.items()):
        if place in places_named or place.startswith(servers):
            shown = dataclasses.asdict(described_card.shown())
            if not described_card.other_schemas:
                del shown["other_schemas"]
            facts = [described_card.hidden, shown, described_card.notes, described_card.metrics]
            by_name.setdefault(named.name_of(place), []).append(digest(facts))
    return {name: digest(found) for name, found in by_name.items()}  # files of one name may lie in several folders


def prompt_digest(protocol: ProtocolSection) -> str:
    """A digest of the prompt's text: after an edit its stages are made anew."""
    path = PROTOCOLS[protocol.name].prompts / f"{protocol.name}_{protocol.prompt}.txt"
    return digest(path.read_text(encoding="utf-8") if path.is_file() else "")


def folder_digest(folder: Path, store: Path | None = None) -> str:
    """A digest of every file in a folder, by content; links are followed. The store remembers them."""
    digests = Digests(store)
    files = digest([[os.path.relpath(file, folder), digests.of(file)] for file in walk(folder)])
    digests.save()
    return files


def gguf_key(file: Path, store: Store) -> str:
    """The key of a GGUF file's folder in the store: a digest of its bytes, and of the way that they are read."""
    path = file.expanduser().resolve()
    if not path.is_file():
        raise DataError(f"there is no file {file}", "Give a GGUF file, a local folder or a hub name as the model.")
    digests = Digests(store.root)
    key = digest([digests.of(path), gguf_model.VERSION])
    digests.save()
    return key


def weights(source: str, store: Store) -> str | None:
    """A digest of the weights under a local `model.source`; None for the tiny model and for a hub's name."""
    path = Path(source).expanduser()
    if gguf_model.is_gguf(path):
        return gguf_key(path, store)
    if source == "tiny" or not path.exists():
        return None
    stage = stage_at(source, store)
    if stage is not None:  # its manifest has the digests
        files = store.manifest(*stage)["files"]
        return digest({name: facts["sha256"] for name, facts in files.items()})
    return folder_digest(path.resolve(), store.root)


def stage_at(source: str, store: Store) -> tuple[str, str] | None:
    """The finished stage of this store that a model's source lies in; None for any other."""
    path = Path(source).expanduser().resolve()
    if not source or not path.is_relative_to(store.root):
        return None
    stage, key, *_ = (*path.relative_to(store.root).parts, "", "")
    return (stage, key) if key and store.has(stage, key) else None


def walk(path: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Every file below a path, links followed; a folder that links lead back to is walked once on the way down.

    `above` has the device and the inode of each folder on the way down.
    """
    if path.is_file():
        yield path
    elif path.is_dir():
        facts = path.stat()
        place = (facts.st_dev, facts.st_ino)
        if place not in above:
            for entry in sorted(path.iterdir()):
                yield from walk(entry, above | {place})


def asked_endpoints(recipe: Recipe, stage: str) -> Iterator[str | None]:
    """The endpoints that a stage asks, by name; None for a teacher that is one and names none."""
    if stage in ("data", "test"):
        yield from recipe.data.cleaners if stage == "data" else ()
        if recipe.data.linker not in NO_ENDPOINT:
            yield recipe.data.linker
    elif stage == "synthesize":
        yield from (teacher.endpoint for teacher in recipe.synthesis.teachers if teacher.kind == "endpoint")
    elif stage in ("gold_schema", "test_schema"):
        yield from recipe.gold_schema.extractors
    elif stage == "grpo":
        judge = endpoint_of(recipe.rewards)
        yield from () if judge is None else (judge,)
    elif stage.startswith("evaluate") and recipe.evaluation.selector:
        yield recipe.evaluation.selector.removeprefix(MERGE)
    if recipe.protocol.name == Ask.name and stage.startswith(("synthesize", "difficulty", "grpo", "evaluate")):
        user = recipe.protocol.options.get("user", SCRIPTED)
        yield from (user,) if user != SCRIPTED else ()


def endpoints(recipe: Recipe, stage: str) -> Mapping[str, Any]:
    """The model behind each endpoint that a stage asks, and the other fields of its entry that decide its answers.

    The address is not part of it: the same model behind another port answers the same. A name without an entry has
    None; whether it is needed is checked before a run begins.
    """
    from pipelines.endpoints.client import endpoint

    names = sorted({name for name in asked_endpoints(recipe, stage) if name is not None})
    facts: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(RecipeError):
            facts[name] = endpoint(name).model_dump(mode="json", include=ANSWER_FIELDS)
    judge = endpoint_of(recipe.rewards)
    return facts | ({"rubric": digest(RUBRIC)} if judge is not None and judge in names else {})


def _path(source: Source) -> Path:
    path = Path(str(source.path)).expanduser().resolve()
    if not path.exists():
        raise DataError(f"no such file or folder: {path}", f"It is the path of a {source.kind} source in the recipe.")
    return path


# Why a stage must run: the differences between the facts that decide its result and those of the nearest finished one.

LOOKED_AT = 20  # finished stages of a kind, the newest ones, that a plan is compared with
SHOWN = 4  # causes of one stage
ABSENT = "nothing"
KINDS = ("recipe", "sources", "cards", "weights", "prompt", "endpoints", "version", "plugins", "libraries", "inputs")


def nearest_changes(folder: Path, about: Mapping[str, Any]) -> str:
    """A few changes of `about` since the finished stage in a folder that differs in the fewest points, on one line:
    "changed: grpo.steps (170 -> 50), sft (its input)"; "" if there is none.
    """
    places, candidates = list[tuple[float, Path]](), []
    for place in (folder / name for name in folder_names(folder)):
        with contextlib.suppress(FileNotFoundError):  # gc has just removed it
            places.append((place.stat().st_mtime, place))
    for _, place in sorted(places, reverse=True)[:LOOKED_AT]:
        with contextlib.suppress(OSError, ValueError):  # a damaged manifest: another check reports it
            old = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            if isinstance(old, dict):
                candidates.append(changes(old, about))
    causes = min(candidates, key=len, default=[])
    more = f", and {len(causes) - SHOWN} more" if len(causes) > SHOWN else ""
    return f"changed: {', '.join(causes[:SHOWN])}{more}" if causes else ""


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The points in which the deciding facts of two stages differ, in words; inputs last, for they change elsewhere."""
    before, after = (
        {point: value for kind in KINDS if kind in about for point, value in _leaves((kind,), about[kind])}
        for about in (old, new)
    )
    points = {**after, **before}
    differing = [point for point in points if before.get(point, ABSENT) != after.get(point, ABSENT)]
    differing.sort(key=lambda point: KINDS.index(point[0]))
    causes = []
    for kind, *rest in differing:
        point, name = (kind, *rest), ".".join(rest)
        values = (before.get(point, ABSENT), after.get(point, ABSENT))
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        turn = " -> ".join(text if len(text) <= 40 else f"{text[:37]}..." for text in texts)
        in_words = {
            "recipe": f"{name} ({turn})",
            "sources": f"the files of {name}",
            "cards": f"the card of {name}",
            "weights": "the weights of model.source",
            "prompt": "the prompt's text",
            "endpoints": f"endpoint {name} ({turn})",
            "version": f"the stage's code (version {turn})",
            "plugins": f"the code of the plug-in's {name}",
            "libraries": f"{name} ({turn})",
        }
        causes.append(in_words.get(kind, f"{name} (its input)"))
    return causes


def _leaves(place: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain values of a tree with their places; items of a list that name their `term` go by that name."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves((*place, str(name)), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            name = inner.get("term", index) if isinstance(inner, Mapping) else index
            yield from _leaves((*place, str(name)), inner)
    else:
        yield place, value
