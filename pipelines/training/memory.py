"""What a training step keeps on each GPU, in bytes, before anything is loaded: from a model's shape and a recipe.

Weights, gradients and optimiser are exact; what DeepSpeed shares out is what its own estimators say (`zero2`, `zero3`).
Activations are an estimate, of the layers' inputs and of one layer that is computed again; logits and keys and values
are counted as they are made. Nothing heavy is imported.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.registry import LOSSES
from pipelines.recipe.config import Model, Recipe
from pipelines.rollout.gguf_model import config_of, is_gguf
from pipelines.rollout.policies.factories import IN_PROCESS
from pipelines.training.samples import LIKE_ROWS, micro_rows

Way = Literal["full", "zero2", "zero3", "lora", "qlora"]
TILE = 4096 * 32768 * 4  # TRL's fused head: tokens, words, and bfloat16 logits with their gradient
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight: 4 bits, a scale of 8 bits for 64, one of 32 for 256 of these
RESERVE = 1 << 30  # the CUDA context and its libraries
WASTE = 1.05  # factor for memory that PyTorch's allocator cannot use


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated MLPs and shared key-value heads (Qwen2, Qwen3, Llama, Mistral)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool
    head: int  # size of one head
    bias: bool = False  # whether queries, keys and values have one (Qwen2)
    norms: bool = False  # whether queries and keys have them (Qwen3)
    window: bool = False  # whether some layer attends over the last tokens only: its rows cannot be packed

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a block's linear layers: queries, keys, values, output, and the MLP's three."""
        query_width = self.heads * self.head
        key_width = self.kv_heads * self.head
        query = (self.hidden, query_width)
        key_or_value = (self.hidden, key_width)
        output = (query_width, self.hidden)
        gate_or_up = (self.hidden, self.ffn)
        down = (self.ffn, self.hidden)
        return [query, key_or_value, key_or_value, output, gate_or_up, gate_or_up, down]

    @property
    def block(self) -> int:
        """Parameters of one block."""
        linear = sum(rows * columns for rows, columns in self.matrices)
        biases = self.bias * (self.heads + 2 * self.kv_heads) * self.head
        norms = 2 * self.hidden + 2 * self.norms * self.head
        return linear + biases + norms

    @property
    def embeddings(self) -> int:
        """Parameters of one table of embeddings, or of the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = 1 if self.tied else 2
        return self.layers * self.block + tables * self.embeddings + self.hidden

    def adapters(self, rank: int) -> int:
        """Parameters of low-rank adapters on every linear layer but the head."""
        by_matrix = [rank * (rows + columns) for rows, columns in self.matrices]
        return self.layers * sum(by_matrix)


# Numbers of each model's config.json on its hub.
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(576, 30, 9, 3, 1536, 49152, True, 64),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Shape(896, 24, 14, 2, 4864, 151936, True, 64, bias=True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": Shape(1536, 28, 12, 2, 8960, 151936, True, 128, bias=True),
    "Qwen/Qwen2.5-Coder-3B-Instruct": Shape(2048, 36, 16, 2, 11008, 151936, True, 128, bias=True),
    "Qwen/Qwen3-4B": Shape(2560, 36, 32, 8, 9728, 151936, True, 128, norms=True),
    "Qwen/Qwen2.5-Coder-7B-Instruct": Shape(3584, 28, 28, 4, 18944, 152064, False, 128, bias=True),
    "Qwen/Qwen3-8B": Shape(4096, 36, 32, 8, 12288, 151936, False, 128, norms=True),
    "Qwen/Qwen2.5-Coder-14B-Instruct": Shape(5120, 48, 40, 8, 13824, 152064, False, 128, bias=True),
}


def shape_of(model: Model) -> Shape:
    """The shape of a recipe's model: made from scratch, known by its hub name, or read in its folder."""
    if model.source == "tiny":
        tiny = model.tiny
        head = tiny.width // tiny.heads
        heads = (tiny.heads, tiny.heads, tiny.ffn, tiny.vocabulary)
        return Shape(tiny.width, tiny.layers, *heads, tied=True, head=head, norms=True)
    if model.source in SHAPES:
        return SHAPES[model.source]
    source = Path(model.source).expanduser()
    if is_gguf(model.source):
        return _shape_in_config(config_of(source))
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _shape_in_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"Give its folder as model.source, or one of: {', '.join(SHAPES)}."
        raise DataError(f"the shape of {model.source} is not known: {type(error).__name__} in {path}", hint) from None


def _shape_in_config(config: dict[str, Any]) -> Shape:
    """The shape that a model's config.json describes."""
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    # `packing.supports_packing` refuses a model with windows; Qwen's are off unless its configuration turns them on.
    is_on_by_default = config.get("model_type") not in ("qwen2", "qwen3")
    is_on = config.get("use_sliding_window", is_on_by_default)
    has_window = bool(is_on) and config.get("sliding_window") is not None
    layer_types = config.get("layer_types")
    if layer_types:
        has_window = set(layer_types) != {"full_attention"}
    return Shape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        head=config.get("head_dim") or hidden // heads,
        bias=config.get("model_type") == "qwen2",
        norms=config.get("model_type") == "qwen3",
        window=has_window,
    )


@dataclass(frozen=True)
class Setup:
    """How a model is trained."""

    # all weights on each GPU, shared out by DeepSpeed, or adapters alone, over a base in the compute dtype or in NF4.
    way: Way
    gpus: int  # processes that train together.
    rows: int  # episodes of one micro-batch; shared prefixes are counted for each.
    tokens: int  # most tokens of an episode; all are taken to have as many.
    slots: int  # episodes that are decoded together in the training process; 0 if servers decode.
    half: bool  # whether products are in bfloat16.
    rank: int = 0  # the adapters' rank.
    # whether adapters are merged into a copy of the base, for servers of one's own that load no adapters.
    sent: bool = False
    # tokens of a part of a micro-batch, or one episode (`hardware.micro_tokens`); None if it is not split.
    most: int | None = None
    # rows of one forward of a model that cannot be packed; None if a forward has the whole micro-batch.
    padded_rows: int | None = None
    reference: bool = False  # whether a second network is there, which the policy is not to leave (`grpo.beta`).
    # whether a second process has the whole network on the same GPU, and decodes while a step is trained
    # (`grpo.staleness` without servers).
    twin: bool = False

    @property
    def backward(self) -> int:
        """Tokens whose layers' inputs are kept until one backward: of a micro-batch, or of a part of it."""
        micro_batch = self.rows * self.tokens
        if self.most is None:
            return micro_batch
        return min(micro_batch, max(self.most, self.tokens))


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU by their use; uses at different times are not added up."""

    weights: int
    copies: int  # copies of the weights, in bfloat16 for products, or merged for servers; and the reference model
    gradients: int
    optimizer: int
    activations: int
    logits: int
    cache: int  # keys and values of the episodes under way
    twin: int = 0  # the network of a second process, which decodes while this one trains

    @property
    def training(self) -> int:
        """Bytes that are held only while a step is trained."""
        return self.gradients + self.activations

    @property
    def peak(self) -> int:
        """The most bytes at any time: there are no gradients while episodes are made, and no keys and values while a
        step is trained; a second process has both.
        """
        resident = self.weights + self.copies + self.optimizer + self.logits
        if self.twin:
            of_two_processes = resident + self.training + self.twin + self.cache
            return int(WASTE * of_two_processes) + 2 * RESERVE
        at_most = resident + max(self.training, self.cache)
        return int(WASTE * at_most) + RESERVE


def setup(recipe: Recipe, kind: Literal["sft", "grpo"], gpus: int) -> Setup:
    """How a recipe trains."""
    hardware = recipe.hardware
    lora = recipe.model.lora
    way = _way(recipe)
    half = recipe.model.compute_dtype == "bfloat16"
    rank = 0
    if lora is not None:
        rank = lora.rank
    if kind == "sft":
        share = max(1, recipe.sft.batch // gpus)
        rows = micro_rows(share, recipe.sft.micro_batch)
        most = hardware.micro_tokens if recipe.sft.group_by == "prefix" else None
        return Setup(way, gpus, rows, recipe.sft.max_tokens, 0, half, rank, most=most)
    grpo = recipe.grpo
    is_served = recipe.rollout.policy != IN_PROCESS
    share = max(1, grpo.questions_per_step * grpo.group // gpus)
    slots = 0
    if not is_served:
        slots = min(recipe.rollout.slots, share)
    is_merged_for_servers = way == "qlora" and is_served
    return Setup(
        way,
        gpus,
        rows=micro_rows(share, grpo.micro_batch),
        tokens=grpo.sampling.episode_tokens,
        slots=slots,
        half=half,
        rank=rank,
        sent=bool(recipe.rollout.servers) or is_merged_for_servers,
        most=hardware.micro_tokens,
        padded_rows=LIKE_ROWS,
        reference=grpo.beta != 0,
        twin=grpo.staleness > 0 and not is_served,
    )


def _way(recipe: Recipe) -> Way:
    """The way in which a recipe keeps the weights under training."""
    lora = recipe.model.lora
    if lora is not None:
        return "lora" if lora.bits is None else "qlora"
    deepspeed = Path(recipe.hardware.deepspeed or "").name
    if "zero3" in deepspeed:
        return "zero3"
    if "zero2" in deepspeed:
        return "zero2"
    return "full"


def estimate_memory(shape: Shape, run: Setup) -> Memory:
    """The bytes on each GPU."""
    from pipelines.rollout.slots import grown_capacity

    product_bytes = 2 if run.half else 4  # bytes of a number in a product
    weights, copies, gradients, optimizer = _states(shape, run, product_bytes)
    if run.reference:
        copies += _reference_bytes(shape, run)
    decoded = run.slots * shape.vocabulary * 4 * 3  # logits, their softmax, and its cumulative sum
    # Bytes of a token's keys, or of its values.
    key_or_value = shape.layers * shape.kv_heads * shape.head * product_bytes
    cache = 0
    if run.slots:
        cache = (run.slots + 1) * grown_capacity(run.tokens) * 2 * key_or_value
    if run.way == "zero3" and run.slots:
        cache += 2 * shape.parameters  # whole weights, gathered to decode with
    twin = 0
    if run.twin:
        bytes_a_weight = 6 if run.half else 4  # float32, and the copy that is multiplied
        twin = bytes_a_weight * shape.parameters
    residual_bytes = 4 if run.way == "full" else product_bytes  # autocast leaves the sum of the layers in float32
    layer_inputs = run.backward * shape.layers * shape.hidden * residual_bytes
    one_layer = _forward_tokens(shape, run) * _layer(shape, product_bytes, residual_bytes)
    return Memory(
        weights,
        copies,
        gradients,
        optimizer,
        activations=layer_inputs + one_layer,
        logits=max(TILE, decoded),
        cache=cache,
        twin=twin,
    )


def _reference_bytes(shape: Shape, run: Setup) -> int:
    """Bytes of the reference model, which ZeRO-2 does not share out; 0 for a policy with adapters, its own without."""
    count = shape.parameters
    if run.way == "full":
        return 4 * count
    if run.way == "zero2":
        return 2 * count
    if run.way == "zero3":
        return 2 * count // run.gpus
    return 0


def _forward_tokens(shape: Shape, run: Setup) -> int:
    """Tokens of one forward: all of a backward, or a share of them for a model with windows, which cannot be packed."""
    if not shape.window:
        return run.backward
    rows = math.ceil(run.backward / run.tokens)
    forwards = math.ceil(run.rows / (run.padded_rows or run.rows))  # each part of a micro-batch has as many
    rows_of_one = math.ceil(rows / forwards)
    return min(run.backward, rows_of_one * run.tokens)


def _states(shape: Shape, run: Setup, product_bytes: int) -> tuple[int, int, int, int]:
    """Bytes of weights, their copies, gradients and optimiser, AdamW's two moments of four bytes each."""
    count = shape.parameters
    gpus = run.gpus
    buckets = 2 if gpus > 1 else 1  # DistributedDataParallel has a second copy of all gradients
    if run.way in ("lora", "qlora"):
        base, merged = _base_bytes(shape, run, product_bytes)
        trained = shape.adapters(run.rank)
        return base + 4 * trained, merged, 4 * trained * buckets, 8 * trained
    if run.way == "full":
        copies = 0
        if run.half:
            copies = 2 * count
        return 4 * count, copies, 4 * count * buckets, 8 * count
    if run.way == "zero2":  # deepspeed's estimate_zero2_model_states_mem_needs: 4 P + 16 P / N
        return 2 * count, 0, 2 * count, 16 * count // gpus
    # deepspeed's estimate_zero3_...: 18 P / N, and the largest layer twice
    largest = max(shape.block, shape.embeddings)
    return 2 * count // gpus, 4 * largest, 0, 16 * count // gpus


def _base_bytes(shape: Shape, run: Setup, product_bytes: int) -> tuple[int, int]:
    """Bytes of the base under adapters, and of the copy in which they are merged for servers."""
    count = shape.parameters
    merged = 0
    if run.sent:
        merged = product_bytes * count
    if run.way == "lora":
        return product_bytes * count, merged
    sizes = [rows * columns for rows, columns in shape.matrices]
    linear = shape.layers * sum(sizes)
    base = product_bytes * (count - linear) + int(NF4 * linear)
    merged += product_bytes * max(sizes)  # matrices are written in full one by one
    return base, merged


def _layer(shape: Shape, product_bytes: int, residual_bytes: int) -> int:
    """Bytes of a token while one block is computed again and differentiated.

    Two norms keep their inputs; queries, keys and values are kept before and after they are turned; the MLP keeps its
    gate, the activated gate, its other half and their product.
    """
    norms = 2 * residual_bytes * shape.hidden
    attention = 3 * shape.heads * shape.head + 4 * shape.kv_heads * shape.head
    products = 4 * shape.hidden + attention + 4 * shape.ffn
    return norms + product_bytes * products


def check_memory(recipe: Recipe, kind: Literal["sft", "grpo"], total: int, gpus: int, free: int) -> str | None:
    """Whether a run fits its GPUs: None if it does; a warning if only the estimated part may not fit.

    Args:
        total: bytes of each GPU.
        free: bytes of each GPU that no other process has, a server of vLLM on the same GPU included.

    Raises:
        ResourceError: the exact part alone does not fit.
    """
    try:
        shape = shape_of(recipe.model)
    except DataError:
        return None  # a hub name that is not known here: the run itself tells
    memory = estimate_memory(shape, setup(recipe, kind, gpus))
    states = memory.weights + memory.gradients + memory.optimizer
    if states + RESERVE > total:
        raise ResourceError(
            f"{recipe.model.source} takes {_gib(states)} GiB of weights, gradients and optimiser for {kind} "
            f"on each GPU, which has {_gib(total)}",
            "Set model.lora={rank: 32, alpha: 64}, with bits: 4 for less, or hardware.deepspeed=zero3 on several GPUs; "
            "see sqltrain plan.",
        )
    if memory.peak <= free:
        return None
    *others, lower = to_lower(recipe, kind)
    if kind == "grpo":
        others.append(lower)
        lower = "grpo.sampling.episode_tokens"
    if others:
        lower = f"{', '.join(others)} or {lower}"
    needs = f"{kind} may take {_gib(memory.peak)} GiB of each GPU, where {_gib(free)} are free"
    return f"{needs}: lower {lower} if memory is full"


def _gib(n_bytes: int) -> str:
    """A number of bytes in whole GiB."""
    return f"{n_bytes / 2**30:.0f}"


def to_lower(recipe: Recipe, kind: str) -> list[str]:
    """The settings that training takes less memory with when they are lower, as far as this recipe may have them."""
    if kind == "sft":
        if recipe.sft.group_by == "prefix":
            return ["hardware.micro_tokens", "sft.micro_batch"]
        return ["sft.micro_batch"]
    knobs = ["grpo.micro_batch"]
    if not LOSSES[recipe.grpo.loss].by_micro_batch:
        knobs.insert(0, "hardware.micro_tokens")
    if recipe.rollout.policy == IN_PROCESS:
        knobs.append("rollout.slots")
    return knobs
