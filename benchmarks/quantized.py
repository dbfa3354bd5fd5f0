"""Execution accuracy, size and speed of a checkpoint's GGUF files under llama.cpp, beside the checkpoint's own.

    python benchmarks/quantized.py miniature CHECKPOINT --quantize bf16,q8_0,q4_k_m --store DIR [KEY=VALUE]...
    python benchmarks/quantized.py smollm2 CHECKPOINT --quantize bf16,q8_0,q4_0 --page real_model [KEY=VALUE]...

CHECKPOINT is a folder. Each file is served by llama.cpp's own server, which the package xllamacpp brings (pip install
xllamacpp); the files are written by sqltrain[gguf]. Both are asked the same held-out questions, greedy. Before that,
llama.cpp's tokens of each prompt are compared with the checkpoint's tokenizer's. (A script called gguf.py would hide
the package of that name.)
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page_sections import write_section

from flows.terminal import Bars, console, say
from pipelines.core.errors import ResourceError, SqltrainError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.endpoints.client import ENDPOINTS_VARIABLE, endpoint
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe
from pipelines.rollout.gguf_model import require_gguf
from pipelines.stages import find_evaluations
from pipelines.stages.answerer import Answerer
from pipelines.stages.evaluated_policy import ENDPOINT
from pipelines.stages.evaluation_texts import read_texts
from pipelines.stages.fingerprints import folder_digest
from pipelines.stages.policy_evaluation import evaluate_benchmark

OVERRIDES = ("evaluation.samples=0", "evaluation.forced_single_turn=false")  # greedy answers alone
PAGES = Path(__file__).resolve().parents[1] / "docs" / "results"
TIMED_PROMPTS = 8
TIMED_TOKENS = 64
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Weights:
    """A file of weights and what came out of asking it."""

    name: str
    size_bytes: int
    evaluation: Path
    tokens_per_s: float | None = None  # written by llama.cpp, one conversation at a time


def require_packages() -> None:
    """Raises ResourceError if a package that writes or serves GGUF files is not installed."""
    require_gguf()
    if importlib.util.find_spec("xllamacpp") is None:
        raise ResourceError("llama.cpp's server, xllamacpp, is not installed", "Run: pip install xllamacpp")


class LlamaServer:
    """llama.cpp's server of one GGUF file, in this process, until it is closed.

    Args:
        model: the GGUF file.
        threads: of a forward pass.
    """

    def __init__(self, model: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = 1
        params.port = 0  # any that is free
        params.verbosity = -1
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self.url = f"{self._server.listening_address}/v1"

    def close(self) -> None:
        """Stop it, and free its memory."""
        del self._server

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, in which a special token's name stands for the token."""
        return self._ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def tokens_per_s(self, chats: list[Chat]) -> float:
        """The median speed at which it writes an answer to each of some conversations."""
        speeds = []
        for chat in chats:
            asked = {"messages": chat, "max_tokens": TIMED_TOKENS, "temperature": 0.0, "ignore_eos": True}
            speeds.append(self._ask("/v1/chat/completions", asked)["timings"]["predicted_per_second"])
        return statistics.median(speeds)

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        address = self._server.listening_address + path
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


def chats_of(evaluation: Path) -> list[Chat]:
    """What the checkpoint was asked in each greedy turn of an evaluation."""
    chats = []
    for played in read_texts(evaluation, ("greedy",)).trajectories:
        chat = [{"role": role, "content": text} for role, text in played.prompt]
        for turn in played.turns:
            chats.append(list(chat))
            chat.append({"role": "assistant", "content": turn.text})
            chat.append({"role": "user", "content": turn.observation or ""})
    return chats


def say_differing_tokens(server: LlamaServer, checkpoint: Path, chats: list[Chat]) -> None:
    """Print in how many conversations llama.cpp has other tokens than the checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    n_differing = 0
    n_tokens = 0
    for chat in chats:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        n_differing += server.tokens(text) != expected
        n_tokens += len(expected)
    say(f"{len(chats)} prompts, {n_tokens:,} tokens: llama.cpp has others in {n_differing} prompts")


def evaluate_file(recipe: Recipe, store: Store, path: Path, server: LlamaServer, bars: Bars) -> Path:
    """Evaluate a GGUF file that is served; the folder of its evaluation."""
    # The store keeps answers by the name of the model, so it is that of these very weights.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    weights = f"{quantisation_of(path)}-{digest[:12]}"
    with tempfile.TemporaryDirectory() as folder:
        entries = Path(folder, "endpoints.yaml")
        entries.write_text(json.dumps({"gguf": {"base_url": server.url, "model": weights}}), encoding="utf-8")
        os.environ[ENDPOINTS_VARIABLE] = str(entries)
        answerer = Answerer(f"{ENDPOINT}gguf", quantisation_of(path), {"weights": weights}, entry=endpoint("gguf"))
        return evaluate_benchmark(recipe, store, answerer, bars)


def quantisation_of(path: Path) -> str:
    """The type of a file that the export wrote, such as q8_0."""
    return path.stem.removeprefix("model-")


def evaluate_all(
    recipe: Recipe, store: Store, checkpoint: Path, types: list[str], out: Path, bars: Bars
) -> Iterator[Weights]:
    """Evaluate a checkpoint and its GGUF files, the largest first.

    Args:
        types: of the export, such as q8_0.
        out: a folder for the files.
    """
    facts = {"digest": folder_digest(checkpoint), "dtype": recipe.model.compute_dtype}
    own = evaluate_benchmark(recipe, store, Answerer(str(checkpoint), "checkpoint", facts), bars)
    own_size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    yield Weights("checkpoint", own_size, own)
    for note in exports.write(lineage_of(checkpoint), "gguf", out, types):
        say(f"note: {note}")
    files = sorted(out.glob("*.gguf"), key=lambda path: -path.stat().st_size)
    chats = chats_of(own)
    for path in files:
        with contextlib.closing(LlamaServer(path, recipe.hardware.threads)) as server:
            if path == files[0]:
                say_differing_tokens(server, checkpoint, chats)
            evaluation = evaluate_file(recipe, store, path, server, bars)
            speed = server.tokens_per_s(chats[:TIMED_PROMPTS])
        yield Weights(quantisation_of(path), path.stat().st_size, evaluation, speed)


def table(rows: list[Weights]) -> str:
    """The figures of a checkpoint, which comes first, and of its files, as Markdown."""
    own, *files = rows
    lines = [
        "| weights | MB | accuracy, % | difference to the checkpoint | gained, lost | tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
        f"| {own.name} | {own.size_bytes / 1e6:.2f} | {accuracy(own)} | | | |",
    ]
    for row in files:
        runs = [f"checkpoint={own.evaluation}", f"{row.name}={row.evaluation}"]
        (change,) = find_evaluations.compare_runs(runs, None)[0].comparisons
        low, high = 100 * change.paired.low, 100 * change.paired.high
        cells = [
            row.name,
            f"{row.size_bytes / 1e6:.2f}",
            accuracy(row),
            f"{100 * change.paired.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
            f"{change.gained}, {change.lost}",
            f"{row.tokens_per_s:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy(row: Weights) -> str:
    """Greedy execution accuracy in percent, with its interval."""
    figures = read_json(row.evaluation / "metrics.json")
    value, low, high = (100 * figures[key] for key in ("ex", "ex_low", "ex_high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    """Write, serve and evaluate the files, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="whose held-out questions are asked, in its protocol")
    parser.add_argument("checkpoint", type=Path, help="a folder of weights")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--quantize", default="bf16,q8_0,q4_k_m", help="types of the export, by commas")
    parser.add_argument("--store", default="store", help="where evaluations are kept")
    parser.add_argument("--page", help="write the table between the markers of docs/results/PAGE.md, too")
    options = parser.parse_intermixed_args()
    require_packages()  # before the minutes of the checkpoint's own evaluation
    words = [f"store={options.store}", *OVERRIDES, *options.overrides]
    recipe, store = open_recipe(options.recipe, words, model=options.checkpoint)
    with tempfile.TemporaryDirectory() as folder, Bars(console) as bars:
        types = options.quantize.split(",")
        rows = list(evaluate_all(recipe, store, options.checkpoint, types, Path(folder, "model"), bars))
    text = table(rows)
    print(text)
    if options.page:
        write_section(PAGES / f"{options.page}.md", "gguf", f"\n{text}\n")


if __name__ == "__main__":
    try:
        main()
    except SqltrainError as error:
        sys.exit(f"{error.message}. {error.hint}")
