"""Tables of the memory that training takes of each GPU: `sqltrain plan`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.recipe.config import Recipe
from pipelines.report.formats import markdown_row
from pipelines.training import memory
from pipelines.training.memory import Setup, Shape, Way

GPU_COUNTS = (1, 2, 4, 8)
GPU_SIZES = (24, 48, 80)  # GB of usual GPUs
ROWS = (64, 32, 16, 8, 4, 2, 1)  # rows of a micro-batch to try, the most first
USES = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "cache", "peak")  # uses of GPU memory
STAGES: tuple[Literal["sft", "grpo"], ...] = ("sft", "grpo")
WAYS_ON_ONE: tuple[Way, ...] = ("full", "lora", "qlora")
WAYS_ON_MANY: tuple[Way, ...] = ("full", "zero2", "zero3", "lora")
GIB = 2**30
DEFAULT_RANK = 32  # rank of adapters for a recipe without any


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of one training stage on so many GPUs."""

    stage: str
    gpus: int
    way: str
    gib: dict[str, float]  # GiB on each GPU by use

    def values(self) -> dict[str, Any]:
        """The need as JSON values."""
        return {"stage": self.stage, "gpus": self.gpus, "way": self.way, **self.gib}

    def line(self) -> str:
        """A row of the table."""
        uses = "".join(f"{self.gib[name]:12.2f}" for name in USES)
        fitting = []
        for size in GPU_SIZES:
            size_gib = size * 1e9 / GIB
            if self.gib["peak"] <= size_gib:
                fitting.append(str(size))
        fits = " ".join(fitting) or "none"
        return f"{self.stage:6}{self.gpus:5}  {self.way:6}{uses}  {fits}"


def memory_needs(recipe: Recipe) -> list[MemoryNeed]:
    """The needs of a recipe's training stages, for 1 to 8 GPUs."""
    shape = memory.shape_of(recipe.model)
    needs = []
    for stage in STAGES:
        if stage not in recipe.stages:
            continue
        for gpus in GPU_COUNTS:
            setup = memory.setup(recipe, stage, gpus)
            used = memory.estimate_memory(shape, setup)
            gib: dict[str, float] = {}
            for name in USES:
                n_bytes = getattr(used, name)
                gib[name] = round(n_bytes / GIB, 2)
            needs.append(MemoryNeed(stage, gpus, setup.way, gib))
    return needs


def need_lines(needs: Sequence[MemoryNeed]) -> Iterator[str]:
    """The table of needs."""
    uses = "".join(f"{name:>12}" for name in USES)
    sizes = ", ".join(map(str, GPU_SIZES))
    yield f"{'stage':6}{'GPUs':>5}  {'way':6}{uses}  fits"
    for need in needs:
        yield need.line()
    yield f"GiB on each GPU; fits: of {sizes} GB"


def fitting_lines(recipe: Recipe) -> list[str]:
    """For models of 0.5B to 14B: the ways that fit one GPU of each size, and eight of 80 GB, with the most rows."""
    largest = GPU_SIZES[-1]
    machines = [(1, size) for size in GPU_SIZES]  # (GPUs, GB of each)
    machines.append((8, largest))
    heads = [f"{size} GB" for size in GPU_SIZES]
    heads.append(f"8 x {largest} GB")
    rank = DEFAULT_RANK
    if recipe.model.lora is not None:
        rank = recipe.model.lora.rank
    rule = "|---" * (len(heads) + 1)
    lines = [markdown_row(["model", *heads]), f"{rule}|"]
    for name, shape in memory.SHAPES.items():
        bare_name = name.rpartition("/")[2]
        cells = [_fitting_ways(recipe, shape, gpus, size, rank) for gpus, size in machines]
        lines.append(markdown_row([bare_name, *cells]))
    tokens = recipe.grpo.sampling.episode_tokens
    slots = memory.setup(recipe, "grpo", 1).slots
    about = f"rows of a micro-batch, episodes of {tokens:,} tokens, {slots} decoded together, adapters of rank {rank}"
    return [*lines, "", about]


def _fitting_ways(recipe: Recipe, shape: Shape, gpus: int, size: int, rank: int) -> str:
    """The ways of training that fit a machine, each with the most rows."""
    base = memory.setup(recipe, "grpo", gpus)
    ways = WAYS_ON_ONE if gpus == 1 else WAYS_ON_MANY
    fitting = []
    for way in ways:
        setup = replace(base, way=way, half=True, rank=rank)
        rows = _most_rows(shape, setup, size * 1e9)
        if rows:
            fitting.append(f"{way} {rows}")
    return ", ".join(fitting) or "–"


def _most_rows(shape: Shape, setup: Setup, n_bytes: float) -> int:
    """The most rows of a micro-batch that fit; 0 if not even one does."""
    for rows in ROWS:
        used = memory.estimate_memory(shape, replace(setup, rows=rows))
        if used.peak <= n_bytes:
            return rows
    return 0
