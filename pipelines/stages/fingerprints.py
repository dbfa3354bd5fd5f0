"""What decides a stage's result and stands outside the recipe: files, weights, prompts, and models behind endpoints."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.prompt_schema import description_files
from pipelines.core.errors import DataError, RecipeError, ResourceError
from pipelines.core.files import digest, read_json, sha256, write_atomic
from pipelines.core.registry import PROTOCOLS
from pipelines.core.store import Store
from pipelines.databases import card, named
from pipelines.endpoints.client import endpoint
from pipelines.recipe.config import ProtocolSection, Recipe, Source
from pipelines.rewards.panel import RUBRIC, endpoint_of
from pipelines.rollout import gguf_model
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.dialect import engine_of_file
from pipelines.stages.asked_endpoints import asked_endpoints

CACHE = "digests.json"
SETTLED_S = 2.0  # A file changed later than that may change again within one tick of its file system's clock.
ANSWER_FIELDS = {"model", "omit", "extra", "system", "reasoning"}  # fields of an endpoint that decide its answers
MISSING = "missing"


class Digests:
    """Digests of files, remembered in a store by (path, size, modification time): gigabytes are read once."""

    def __init__(self, store: Path | None) -> None:
        self._path: Path | None = None
        self._known: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        if store is not None:
            self._path = store / CACHE
            with contextlib.suppress(DataError):  # Ignore a corrupt digest cache; it is rebuilt.
                self._known = read_json(self._path)

    def of(self, path: Path) -> str:
        """The digest of a file's bytes; `MISSING` if there is none."""
        try:
            key, is_settled = self._cache_key(path)
            value = self._known.get(key) or self._new.get(key)
            if value is None:
                value = sha256(path)
                if is_settled:
                    self._new[key] = value
        except (OSError, ValueError):  # a missing file, a folder, a name that no file can have
            return MISSING
        return str(value)

    def files(self, source: Source, path: Path) -> list[Path]:
        """The files that a source's reader names, and the file itself; every file there if the reader names none.

        Those that the rows of a single file name are remembered too: it may be long.
        """
        cache_key = ""
        is_settled = False
        if path.is_file() and _named_by_rows_alone(source):
            file_key, is_settled = self._cache_key(path)
            reader = digest([source.kind, source.options, source.corrections])
            cache_key = f"files|{reader}|{file_key}"
            if cache_key in self._known:
                return [Path(file) for file in self._known[cache_key]]
        named_files = base.files(source)
        if named_files is None:
            named_files = walk_files(path)
        files = sorted(set(named_files))
        if is_settled:
            self._new[cache_key] = [str(file) for file in files]
        return files

    def save(self) -> None:
        """Keep what is new. A store that cannot be written keeps nothing: the files are read again the next time."""
        if self._new and self._path is not None:
            with contextlib.suppress(OSError, ResourceError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                digests = {**self._known, **self._new}
                write_atomic(self._path, json.dumps(digests, sort_keys=True))

    @staticmethod
    def _cache_key(path: Path) -> tuple[str, bool]:
        """The key of a file in the cache, and whether its modification time is old enough to stand for its bytes."""
        status = path.stat()
        key = f"{path}|{status.st_size}|{status.st_mtime_ns}"
        age = time.time() - status.st_mtime
        return key, age > SETTLED_S


def _named_by_rows_alone(source: Source) -> bool:
    """Whether the rows of a source's file decide alone which files its reader names.

    With the option `databases` those that are there decide, too, and with `invented` a second file. A reader that we do
    not know may look anywhere.
    """
    if source.kind not in ("csv", "jsonl"):
        return False
    return not (source.options.get("databases") or source.options.get("invented"))


def fingerprint(sources: Iterable[Source], store: Path, shows_descriptions: bool = False) -> dict[str, str]:
    """For each path of some sources, a digest of the files there that their readers read; unrelated ones don't count.

    Links are followed. A file that a reader names and is not there counts, too: it may come.

    Args:
        shows_descriptions: whether prompts show descriptions of columns. Then the files that describe the databases of
            a single file of questions count, too; a reader of a folder names such files itself.
    """
    digests = Digests(store)
    by_folder: dict[str, dict[str, str]] = {}
    for source in sources:
        if not source.path:
            continue
        path = _path(source)
        folder = by_folder.setdefault(str(path), {})
        files = digests.files(source, path)
        if shows_descriptions and path.is_file():
            files += _descriptions_beside(files)
        for file in files:
            relative_path = os.path.relpath(file, path)
            folder[relative_path] = digests.of(file)
    digests.save()
    return {path: digest(files) for path, files in by_folder.items()}


def _descriptions_beside(files: Iterable[Path]) -> list[Path]:
    """The files that describe the databases among some files, looked for anew each time: more of them may come."""
    found: list[Path] = []
    for file in files:
        if engine_of_file(file) in ("sqlite", None):  # a database of an unknown suffix is read as SQLite
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # a name that no file can have
                found += description_files(file)
    return found


def cards(sources: Sequence[Source], store: Path) -> dict[str, str]:
    """The digests of the cards that describe databases of some sources, by the databases' names; {} for no card."""
    cards_by_database = card.by_database()
    if not cards_by_database:
        return {}
    identities = _database_identities(sources, store)
    servers = tuple(name for name in identities if name.endswith("/"))
    digests_by_name: dict[str, list[str]] = {}  # files of one name may lie in several folders
    for name, database_card in sorted(cards_by_database.items()):
        if name in identities or name.startswith(servers):
            short_name = named.short_name(name)
            digests = digests_by_name.setdefault(short_name, [])
            digests.append(_card_digest(database_card))
    return {name: digest(digests) for name, digests in digests_by_name.items()}


def _database_identities(sources: Sequence[Source], store: Path) -> set[str]:
    """The identities of the databases that sources name; one that ends in "/" stands for all of a server's."""
    digests = Digests(store)
    locations: list[str] = []
    for source in sources:
        if source.path:
            locations += map(str, digests.files(source, _path(source)))
    digests.save()
    for source in sources:
        locations += base.addresses(source)
    return {identity(location) for location in locations}


def _card_digest(database_card: card.DatabaseCard) -> str:
    """A digest of the parts of a card that decide prompts and results."""
    visible = dataclasses.asdict(database_card.shown())
    if not database_card.other_schemas:
        del visible["other_schemas"]
    return digest([database_card.hidden, visible, database_card.notes, database_card.metrics])


def prompt_digest(protocol: ProtocolSection) -> str:
    """A digest of the prompt's text: after an edit its stages are made anew."""
    path = PROTOCOLS[protocol.name].prompts / f"{protocol.name}_{protocol.prompt}.txt"
    text = ""
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    return digest(text)


def folder_digest(folder: Path, store: Path | None = None) -> str:
    """A digest of every file in a folder, by content; links are followed. The store remembers them."""
    digests = Digests(store)
    files = []
    for file in walk_files(folder):
        relative_path = os.path.relpath(file, folder)
        files.append([relative_path, digests.of(file)])
    digests.save()
    return digest(files)


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
        file_digests = {name: entry["sha256"] for name, entry in files.items()}
        return digest(file_digests)
    return folder_digest(path.resolve(), store.root)


def stage_at(source: str, store: Store) -> tuple[str, str] | None:
    """The finished stage of this store that a model's source lies in; None for any other."""
    path = Path(source).expanduser().resolve()
    if not source or not path.is_relative_to(store.root):
        return None
    steps = path.relative_to(store.root).parts
    if len(steps) < 2:
        return None
    stage, key, *_ = steps
    if not store.has(stage, key):
        return None
    return stage, key


def walk_files(path: Path, ancestors: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Every file below a path, links followed; a folder that links lead back to is walked once on the way down.

    Args:
        ancestors: the device and the inode of each folder on the way down.
    """
    if path.is_file():
        yield path
    elif path.is_dir():
        status = path.stat()
        folder = (status.st_dev, status.st_ino)
        if folder in ancestors:
            return
        for entry in sorted(path.iterdir()):
            yield from walk_files(entry, ancestors | {folder})


def endpoint_fingerprints(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The model behind each endpoint that a stage asks, and the other fields of its entry that decide its answers.

    The address is not part of it: the same model behind another port answers the same. A name without an entry has
    None; whether it is needed is checked before a run begins.
    """
    endpoint_names = asked_endpoints(recipe, stage)
    names = sorted({name for name in endpoint_names if name is not None})
    judge = endpoint_of(recipe.rewards)
    entries: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(RecipeError):
            entry = endpoint(name)
            entries[name] = entry.model_dump(mode="json", include=ANSWER_FIELDS)
    if judge is not None and judge in names:
        entries["rubric"] = digest(RUBRIC)
    return entries


def _path(source: Source) -> Path:
    path = Path(str(source.path)).expanduser().resolve()
    if not path.exists():
        raise DataError(f"no such file or folder: {path}", f"It is the path of a {source.kind} source in the recipe.")
    return path
