"""Execution accuracy of a checkpoint's GGUF files under llama.cpp, beside the checkpoint's own on the same questions.

    python benchmarks/quantized.py miniature CHECKPOINT --quantize bf16,q8_0,q4_k_m --store DIR [KEY=VALUE]...

CHECKPOINT is a folder. Each file is served by `python -m llama_cpp.server`, so it needs llama-cpp-python[server] beside
sqltrain[gguf]. Before that, llama.cpp's tokens of each prompt are compared with the checkpoint's tokenizer's. (A script
called gguf.py would hide the package of that name.)
"""

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from flows.terminal import Bars, console, say
from pipelines.core.errors import EndpointError, SqltrainError
from pipelines.core.files import read_json
from pipelines.endpoints.client import ENDPOINTS_VARIABLE, endpoint
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.recipe.opening import open_recipe
from pipelines.stages import find_evaluations
from pipelines.stages.answerer import Answerer
from pipelines.stages.evaluated_policy import ENDPOINT
from pipelines.stages.evaluation_texts import read_texts
from pipelines.stages.fingerprints import folder_digest
from pipelines.stages.policy_evaluation import evaluate_benchmark

OVERRIDES = ("evaluation.samples=0", "evaluation.forced_single_turn=false")  # greedy answers alone
START_S = 120.0


def same_tokens(model: Path, checkpoint: Path, evaluation: Path) -> tuple[int, int, int]:
    """Prompts of the checkpoint's greedy turns, how many of them have other tokens in llama.cpp, and tokens in all."""
    import llama_cpp
    from transformers import AutoTokenizer

    theirs = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    n_prompts = differ = n_tokens = 0
    for played in read_texts(evaluation, ("greedy",)).trajectories:
        chat = [{"role": role, "content": text} for role, text in played.prompt]
        for turn in played.turns:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            differ += ours != theirs.tokenize(text.encode(), add_bos=False, special=True)
            n_prompts, n_tokens = n_prompts + 1, n_tokens + len(ours)
            chat += [
                {"role": "assistant", "content": turn.text},
                {"role": "user", "content": turn.observation or ""},
            ]
    return n_prompts, differ, n_tokens


@contextlib.contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """A server of a GGUF file: its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    words = ["--model", str(model), "--n_ctx", "0", "--n_threads", "1", "--n_threads_batch", "1", "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-m", "llama_cpp.server", *words], stdout=out, stderr=out)
    try:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            if server.poll() is not None or time.monotonic() > end:
                raise EndpointError(f"the server of {model.name} does not start", log.read_text()[-400:])
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--quantize", default="bf16,q8_0,q4_k_m")
    parser.add_argument("--store", default="store")
    given = parser.parse_intermixed_args()
    words = [f"store={given.store}", *OVERRIDES, *given.overrides]
    recipe, store = open_recipe(given.recipe, words, model=given.checkpoint)
    with tempfile.TemporaryDirectory() as room, Bars(console) as bars:
        out = Path(room, "model")
        for note in exports.write(lineage_of(given.checkpoint), "gguf", out, given.quantize.split(",")):
            say(f"note: {note}")
        about = {"digest": folder_digest(given.checkpoint), "dtype": recipe.model.compute_dtype}
        runs = {
            "checkpoint": evaluate_benchmark(recipe, store, Answerer(str(given.checkpoint), "checkpoint", about), bars)
        }
        files = {
            path.stem.removeprefix("model-"): path
            for path in sorted(out.glob("*.gguf"), key=lambda one: -one.stat().st_size)
        }
        n, differ, n_tokens = same_tokens(next(iter(files.values())), given.checkpoint, runs["checkpoint"])
        say(f"{n} prompts, {n_tokens:,} tokens: llama.cpp has others in {differ} prompts")
        for name, path in files.items():
            with served(path, Path(room, f"{name}.log")) as url:
                # The store keeps answers by the name of the model, so it is that of these very weights.
                weights = f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
                entries = Path(room, "endpoints.yaml")
                entries.write_text(json.dumps({"gguf": {"base_url": url, "model": weights}}), encoding="utf-8")
                os.environ[ENDPOINTS_VARIABLE] = str(entries)
                answerer = Answerer(f"{ENDPOINT}gguf", name, {"weights": weights}, entry=endpoint("gguf"))
                runs[name] = evaluate_benchmark(recipe, store, answerer, bars)
        table = Table("weights", "MB", "accuracy, %", "to the checkpoint", "gained, lost")
        sizes = {name: path.stat().st_size for name, path in files.items()}
        sizes["checkpoint"] = sum(path.stat().st_size for path in given.checkpoint.glob("*.safetensors"))
    for name, folder in runs.items():
        figures, paired, flips = read_json(folder / "metrics.json"), "", ""
        if name != "checkpoint":
            both = find_evaluations.compare_runs([f"checkpoint={runs['checkpoint']}", f"{name}={folder}"], None)[0]
            (change,) = both.comparisons
            low, high = (100 * bound for bound in (change.paired.low, change.paired.high))
            paired = f"{100 * change.paired.difference:+.1f} [{low:+.1f}, {high:+.1f}]"
            flips = f"{change.gained}, {change.lost}"
        ex = "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * figures[key] for key in ("ex", "ex_low", "ex_high")))
        table.add_row(name, f"{sizes[name] / 1e6:.2f}", ex, paired, flips)
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except SqltrainError as error:
        sys.exit(f"{error.message}. {error.hint}")
