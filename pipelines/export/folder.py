"""Writes an export: the files of a checkpoint that others need, whole or not at all, with its cards beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from pipelines.errors import DataError
from pipelines.export import cards, ollama
from pipelines.export.lineage import Lineage
from pipelines.store import require_room, write_json, writing

Kind = Literal["hub-folder", "hub-adapter", "ollama"]
README, DATASET, MODELFILE = "README.md", Path("dataset", "README.md"), "Modelfile"
MODEL = (  # no optimizer, no pickle, no curve
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "sqltrain.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt"),
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", *MODEL[-6:])


def write(lineage: Lineage, kind: Kind, out: Path) -> list[str]:
    """Write an export; returns what a person should know of it, a line each.

    Raises:
        DataError: `out` is there already, the checkpoint has no adapters, or its chat template cannot be said.
        ResourceError: no room on the disk, or it cannot be written.
    """
    if out.exists():
        raise DataError(f"{out} exists", "Name a folder that is not there yet.")
    source, patterns = (lineage.adapter, ADAPTER) if kind == "hub-adapter" else (lineage.folder, MODEL)
    if source is None:
        raise DataError(f"{lineage.folder} has no adapters beside it", "Export it with --to hub-folder.")
    files = list(_files(source, patterns))
    if kind == "hub-adapter":
        files += list(_files(lineage.folder, ("sqltrain.json", "chat_template.jinja")))
    beside = out.with_name(f".{out.name}.partial")
    with writing(out.parent):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        require_room(beside, sum(path.stat().st_size for path in files) // 2**20 + 1)
        for path in files:
            shutil.copyfile(path, beside / path.name)
        notes = _describe(lineage, kind, beside, out.name)
        beside.rename(out)
    return notes


def _describe(lineage: Lineage, kind: Kind, folder: Path, name: str) -> list[str]:
    """Write the cards, and what this kind needs besides."""
    if kind == "hub-adapter":
        _name_base(lineage, folder / "adapter_config.json")
    text = cards.model_card(lineage, name, "adapter" if kind == "hub-adapter" else "model")
    (folder / README).write_text(text, encoding="utf-8")
    (folder / DATASET).parent.mkdir()
    (folder / DATASET).write_text(cards.dataset_card(lineage), encoding="utf-8")
    if kind != "ollama":
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    (folder / MODELFILE).write_text(ollama.modelfile(folder, tokenizer, lineage.card), encoding="utf-8")
    return list(ollama.lacks(folder))


def _name_base(lineage: Lineage, path: Path) -> None:
    """Let adapters name their base by its hub name, and never by a path of this machine."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    base = cards.hub_name((lineage.setting("model") or {}).get("source"))
    write_json(path, {**settings, "base_model_name_or_path": base})


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            yield path
