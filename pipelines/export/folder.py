"""Writes an export: the files of a checkpoint that others need, whole or not at all, with its cards beside them."""

import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from pipelines.core.errors import DataError, EndpointError, UserError
from pipelines.core.files import read_json, require_room, write_json, writing
from pipelines.export import cards, llama_cpp
from pipelines.export.cards import Lineage
from pipelines.recipe.checkpoint import CARD
from pipelines.rollout.checkpoint_files import (
    INDEX,
    SINGLE,
    network_of,
    require_adapters,
    require_checkpoint,
    require_finite_files,
    tokenizer_of,
    weight_files,
)

Kind = Literal["hub-folder", "hub-adapter", "gguf", "ollama"]
HINT = "Export it with --to hub-folder."
README = "README.md"
DATASET = Path("dataset", "README.md")
MODELFILE = "Modelfile"
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SETTINGS = ("config.json", "generation_config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def write(lineage: Lineage, kind: Kind, out: Path, types: Sequence[str] = ("bf16",)) -> list[str]:
    """Write an export, with GGUF files of some types if its kind has them; returns notes for its user, a line each."""
    if out.exists():
        raise DataError(f"{out} exists", "Name a folder that is not there yet.")
    files = _adapter_files(lineage) if kind == "hub-adapter" else _weight_files(lineage)
    files += _files(lineage.folder, (CARD, *TOKENIZER))
    n_copies = 1
    if kind in ("gguf", "ollama"):
        n_copies += len(types)
    work = out.with_name(f".{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    notes: list[str] = []
    try:
        with writing(out.parent):
            work.mkdir(parents=True)
            n_bytes = sum(path.stat().st_size for path in files)
            require_room(work, n_copies * n_bytes // 2**20 + 1)
            for path in files:
                shutil.copyfile(path, work / path.name)
            if kind == "hub-adapter":
                _name_base(lineage, work)
            else:
                _write_weights(lineage, work)
            _write_cards(lineage, kind, work, out.name)
            if kind in ("gguf", "ollama"):
                notes = _write_gguf(lineage, kind, work, out.name, types)
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return notes


def _adapter_files(lineage: Lineage) -> list[Path]:
    """The low-rank adapters of a checkpoint, if others can load them."""
    if lineage.adapter is None:
        raise DataError(f"{lineage.folder} has no adapters beside it", HINT)
    if cards.base_name(lineage) is None:
        raise DataError("the base of these adapters has no hub name, so nobody could load them", HINT)
    if lineage.card is not None and lineage.card.stage == "grpo" and "sft" in lineage.manifests:
        raise DataError("these adapters lie over the checkpoint of SFT, which has no hub name", HINT)
    return list(_files(lineage.adapter, ADAPTER))


def _weight_files(lineage: Lineage) -> list[Path]:
    """The settings and the safetensors of a checkpoint."""
    require_checkpoint(lineage.folder)
    require_finite_files(lineage.folder)
    weights = weight_files(lineage.folder)
    files = [*_files(lineage.folder, SETTINGS), *weights]
    if weights and not (lineage.folder / SINGLE).is_file():
        files.append(lineage.folder / INDEX)
    return files


def _name_base(lineage: Lineage, work: Path) -> None:
    """Name the base of adapters by its hub name and commit, never by a path of this machine."""
    path = work / "adapter_config.json"
    model = lineage.setting("model") or {}
    settings = read_json(path)
    settings["base_model_name_or_path"] = cards.base_name(lineage)
    settings["revision"] = model.get("revision")
    write_json(path, settings)
    require_adapters(work)


def _write_weights(lineage: Lineage, work: Path) -> None:
    """Write safetensors in place of pickled weights, which other programs rightly refuse to open."""
    if not weight_files(lineage.folder):
        network = network_of(str(lineage.folder), dtype="auto")
        network.save_pretrained(work)
    require_checkpoint(work)


def _write_cards(lineage: Lineage, kind: Kind, work: Path, name: str) -> None:
    """Write the model's card and that of its demonstrations; without any, the counts of its questions."""
    card_kind = "adapter" if kind == "hub-adapter" else "model"
    card = cards.model_card(lineage, name, card_kind)
    (work / README).write_text(card, encoding="utf-8")
    demonstrations = lineage.demonstrations
    if not demonstrations:
        paragraphs = ["# Questions", *cards.question_counts(lineage)]
        demonstrations = "\n\n".join(paragraphs) + "\n"
    dataset_card = work / DATASET
    dataset_card.parent.mkdir()
    dataset_card.write_text(demonstrations, encoding="utf-8")


def _write_gguf(lineage: Lineage, kind: Kind, work: Path, name: str, types: Sequence[str]) -> list[str]:
    """Write the GGUF files, and for Ollama a Modelfile; returns notes for the user."""
    weights = "."
    try:
        gguf_files, notes = llama_cpp.write_gguf(work, name, types)
        weights = f"./{gguf_files[0]}"
    except (ValueError, LookupError) as error:
        raise DataError(f"{lineage.folder} is damaged: {error}", "Train it again.") from None
    except DataError as error:
        if kind == "gguf":
            raise
        notes = [f"{error.message}: Ollama imports the safetensors itself, if it supports the architecture"]
    if kind == "ollama":
        tokenizer = tokenizer_of(str(work))
        text = llama_cpp.modelfile(work, weights, tokenizer, lineage.card)
        (work / MODELFILE).write_text(text, encoding="utf-8")
    return notes


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            yield path


# The upload of an export to a hub, if there is a token for it.

HUB_HINT = "Set HF_TOKEN, or run: hf auth login"


def push(folder: Path, name: str, token: str) -> str:
    """Upload a folder into a repository of that name, made private if it is new; returns its address."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model of sqltrain")
    except (HFValidationError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, HFValidationError):
            raise UserError(f"{name!r} is not a valid name of a repository: {reason}", "Write OWNER/NAME.") from None
        if not isinstance(error, HfHubHTTPError):
            raise EndpointError(f"the hub cannot be reached: {reason}") from None
        status = error.response.status_code
        if status in (401, 403):
            hint = f"It needs the right to write; {HUB_HINT}"
            raise UserError(f"the hub refuses the token ({status})", hint) from None
        raise EndpointError(f"the hub answers {status}: {reason}") from None
    return str(url)
