"""What the loss step of a large vocabulary holds in memory: whole logits, TRL's fused head, and ours, tensors counted.

    python benchmarks/memory.py [--tokens 1024 4096 16384 32768] [--vocabulary 151936] [--write]

One forward and backward of log-probabilities and entropies over a row of so many tokens, on the CPU: a decoder of one
narrow layer (64 wide, so that the head is all that counts) with a vocabulary as Qwen's. The peak is the most that
PyTorch's allocator held at once beyond the weights and their gradients. Whole logits are measured as far as 6 GiB go:
they are a multiple of the tokens, so longer rows follow from the last one measured (marked ~). So does TRL's head: its
tiles hold 4,096 tokens at most, and it takes minutes for more. `--write` puts the table into docs/results/gpu.md.
"""

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from page_sections import write_section
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from pipelines.training import packing
from pipelines.training.fused_head import FusedHead, patch_trl_lm_head

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "gpu.md"
WIDTH, PROMPT, MOST = 64, 64, 6 << 30
TRL_TILE = 4096  # tokens


def network(vocabulary: int) -> Any:
    """A decoder whose head is nearly all of it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1 << 16}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **sizes, **heads)).train()


def whole(model: Any, ids: Tensor) -> Tensor:
    """Logits, log-softmax, gather."""
    log_ps = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        -(log_ps.exp() * log_ps).sum(-1)
    return log_ps.gather(-1, ids[:, 1:].unsqueeze(-1)).sum()  # type: ignore[no-any-return]


def fused(model: Any, ids: Tensor) -> Tensor:
    """What the trainer does with a row."""
    mask = torch.ones_like(ids)
    packed = packing.pack(ids, mask, ids.size(1) - PROMPT)
    log_probs, _, _ = packing.packed_scores(model, packed, mask[:, PROMPT:])
    return log_probs.sum()


def peak(step: Callable[[], Tensor]) -> int:
    """Bytes that the allocator held at most during a step's forward and backward, beyond what it held before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step().backward()  # type: ignore[no-untyped-call]
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(tokens: int, vocabulary: int) -> dict[str, int]:
    """The peak of each way; whole logits only where they fit."""
    ids = torch.arange(tokens)[None] % vocabulary
    model = network(vocabulary)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    packing.use_packed_attention(model)
    patch_trl_lm_head()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    ways = {"ours": (FusedHead, fused)}
    if tokens <= TRL_TILE:
        ways["trl"] = (ChunkedLogProbFunction, fused)
    if 4 * tokens * vocabulary * 4 < MOST:
        ways["whole"] = (ChunkedLogProbFunction, whole)
    peaks = {}
    for name, (function, step) in ways.items():
        utils._ChunkedLogProbFunction = function
        peaks[name] = peak(lambda step=step: step(model, ids))  # type: ignore[misc]
    return peaks


def table(rows: dict[int, dict[str, int]]) -> str:
    """The peaks in GiB, a row a length."""
    lines = ["| tokens | whole logits | TRL's fused head | ours |", "|---:|---:|---:|---:|"]
    for tokens in rows:
        cells = []
        for way, grows in (("whole", True), ("trl", False), ("ours", False)):
            last = max(other for other, known in rows.items() if way in known and other <= max(tokens, min(rows)))
            factor = tokens / last if grows else 1.0
            mark = "" if last == tokens else "~"
            cells.append(f"{mark}{rows[last][way] * factor / 2**30:.2f}")
        lines.append(f"| {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--write", action="store_true", help="put the table into docs/results/gpu.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = table({tokens: measure(tokens, options.vocabulary) for tokens in options.tokens})
    print(text)
    if options.write:
        write_section(PAGE, "loss step", text)


if __name__ == "__main__":
    main()
