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
    tokenizer_of,
    weight_files,
)

Kind = Literal["hub-folder", "hub-adapter", "gguf", "ollama"]
HINT = "Export it with --to hub-folder."
README, DATASET, MODELFILE = "README.md", Path("dataset", "README.md"), "Modelfile"
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt"),
)
SETTINGS = ("config.json", "generation_config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def write(lineage: Lineage, kind: Kind, out: Path, types: Sequence[str] = ("bf16",)) -> list[str]:
    """Write an export, with GGUF files of some types if its kind has them; returns notes for its user, a line each."""
    if out.exists():
        raise DataError(f"{out} exists", "Name a folder that is not there yet.")
    if kind == "hub-adapter":
        if lineage.adapter is None:
            raise DataError(f"{lineage.folder} has no adapters beside it", HINT)
        if cards.base_name(lineage) is None:
            raise DataError("the base of these adapters has no hub name, so nobody could load them", HINT)
        if lineage.card is not None and lineage.card.stage == "grpo" and "sft" in lineage.manifests:
            raise DataError("these adapters lie over the checkpoint of SFT, which has no hub name", HINT)
        files = list(_files(lineage.adapter, ADAPTER))
    else:
        require_checkpoint(lineage.folder)
        files = [*_files(lineage.folder, SETTINGS), *weight_files(lineage.folder)]
        if len(weight_files(lineage.folder)) > 0 and not (lineage.folder / SINGLE).is_file():
            files.append(lineage.folder / INDEX)
    files += _files(lineage.folder, (CARD, *TOKENIZER))
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with writing(out.parent):
            beside.mkdir(parents=True)
            copies = 1 + len(types) * (kind in ("gguf", "ollama"))
            require_room(beside, copies * sum(path.stat().st_size for path in files) // 2**20 + 1)
            for path in files:
                shutil.copyfile(path, beside / path.name)
            if kind != "hub-adapter" and not weight_files(lineage.folder):
                # Pickled weights, which other programs rightly refuse to open.
                network_of(str(lineage.folder), dtype="auto").save_pretrained(beside)
            if kind == "hub-adapter":  # its base goes by its hub name and commit, and never by a path of this machine
                revision = (lineage.setting("model") or {}).get("revision")
                names = {"base_model_name_or_path": cards.base_name(lineage), "revision": revision}
                write_json(beside / "adapter_config.json", {**read_json(beside / "adapter_config.json"), **names})
                require_adapters(beside)
            else:
                require_checkpoint(beside)
            text = cards.model_card(lineage, out.name, "adapter" if kind == "hub-adapter" else "model")
            (beside / README).write_text(text, encoding="utf-8")
            # The card of the demonstrations; without any, the counts of the questions.
            text = lineage.demonstrations or "\n\n".join(["# Questions", *cards.question_counts(lineage)]) + "\n"
            (beside / DATASET).parent.mkdir()
            (beside / DATASET).write_text(text, encoding="utf-8")
            notes: list[str] = []
            weights = "."
            if kind in ("gguf", "ollama"):
                try:
                    gguf_files, notes = llama_cpp.write_gguf(beside, out.name, types)
                    weights = f"./{gguf_files[0]}"
                except (ValueError, LookupError) as error:
                    raise DataError(f"{lineage.folder} is damaged: {error}", "Train it again.") from None
                except DataError as error:
                    if kind == "gguf":
                        raise
                    notes = [f"{error.message}: Ollama imports the safetensors itself, if it supports the architecture"]
            if kind == "ollama":
                text = llama_cpp.modelfile(beside, weights, tokenizer_of(str(beside)), lineage.card)
                (beside / MODELFILE).write_text(text, encoding="utf-8")
            beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
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
