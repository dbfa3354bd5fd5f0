"""A damaged stage: noticed before another one reads it, set aside, made again; never a traceback."""

import shutil
from pathlib import Path

import pytest

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_json
from pipelines.core.store import DAMAGED, MANIFEST, MARK, Store
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph, train
from pipelines.stages.context import Context, Silent

SMALL = [f"data.{pool}.options={{databases: 1, questions: 3}}" for pool in ("sft", "dev", "test.0")]
RECIPE = (*SMALL, "data.rl=[]", "rollout.processes=1", "stages=[data, synthesize, filter]")


class FolderFacts(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def walk(recipe: Recipe, store: Store) -> tuple[dict[str, graph.StageResult], list[str]]:
    said, steps = FolderFacts(), graph.plan(recipe, store)
    return {step.name: graph.execute(step, recipe, store, said, steps) for step in steps}, said.lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage") / "store"
    walk(recipes.load("miniature", RECIPE), Store(root))
    return root


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Store:
    shutil.copytree(finished, tmp_path / "store", symlinks=True)
    return Store(tmp_path / "store")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder_of(store: Store, stage: str) -> Path:
    (key,) = [key for kind, key in store.made() if kind == stage]
    return store.folder(stage, key)


def test_a_flipped_bit_is_noticed_by_the_stage_that_reads_it(store: Store) -> None:
    data = folder_of(store, "synthesize") / "data.parquet"
    whole = data.read_bytes()
    flip(data)
    shutil.rmtree(folder_of(store, "filter"))
    _, said = walk(recipes.load("miniature", RECIPE), store)
    key = data.parent.name
    assert said == [f"synthesize/{key} is damaged (data.parquet): set aside as {DAMAGED}{key}-0"]
    assert data.read_bytes() == whole
    assert (store.root / "synthesize" / f"{DAMAGED}{key}-0").is_dir()


def test_every_cut_file_of_every_stage_is_made_again(finished: Path, tmp_path: Path) -> None:
    recipe = recipes.load("miniature", RECIPE)
    names = [
        (stage, key, name)
        for stage, key in Store(finished).made()
        for name in (MANIFEST, *Store(finished).manifest(stage, key)["files"])
        if (finished / stage / key / name).stat().st_size
    ]
    assert len(names) > 10
    for number, (stage, key, name) in enumerate(names):
        shutil.copytree(finished, tmp_path / str(number), symlinks=True)
        store = Store(tmp_path / str(number))
        cut(store.folder(stage, key) / name)
        because = {step.name: step.why for step in graph.plan(recipe, store) if not step.cached}
        assert because == {stage: f"damaged: {name}"}
        _, said = walk(recipe, store)
        assert said[0].startswith(f"{stage}/{key} is damaged ({name})"), name
        assert store.damage(stage, key, whole=True) == []


def test_flipped_bits_in_weights_are_noticed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def fake(ctx: Context) -> None:
        trained.append(ctx.stage)
        (ctx.folder / "model").mkdir(exist_ok=True)
        (ctx.folder / "model" / "model.safetensors").write_bytes(bytes(4096))
        ctx.metrics({})

    for name in ("model", "sft", "grpo"):
        monkeypatch.setattr(train, name, fake)
    monkeypatch.setattr("pipelines.stages.curate.filter_trajectories", lambda ctx: ctx.metrics({}))
    monkeypatch.setattr("pipelines.stages.synthesize.build", lambda ctx: ctx.metrics({}))
    monkeypatch.setattr("pipelines.stages.data.build", lambda ctx: ctx.metrics({}))
    store = Store(tmp_path)
    chain = "stages=[data, synthesize, filter, sft, grpo]"
    walk(recipes.load("miniature", [chain]), store)
    flip(folder_of(store, "sft") / "model" / "model.safetensors")
    _, said = walk(recipes.load("miniature", [chain, "grpo.steps=9"]), store)
    assert said[0].startswith("sft/")
    assert trained == ["model", "sft", "grpo", "sft", "grpo"]


def test_a_damaged_stage_that_a_run_was_given_is_named_and_not_made_up(store: Store) -> None:
    given = {"synthesize": folder_of(store, "synthesize").name}
    cut(folder_of(store, "synthesize") / "data.parquet")
    shutil.rmtree(folder_of(store, "filter"))
    recipe = recipes.load("miniature", [*RECIPE, "synthesis.samples=2"])  # would make another one
    steps = graph.plan(recipe, store, "filter", given)
    with pytest.raises(DataError, match=r"synthesize/\w+ is damaged or gone, and this run does not make it"):
        graph.execute(steps[-1], recipe, store, Silent(), steps)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_one_plain_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.json").write_bytes(content)
    with pytest.raises(DataError, match=r"metrics.json is damaged: it is not JSON"):
        read_json(tmp_path / "metrics.json")


def test_a_cut_table_is_one_plain_line(store: Store) -> None:
    data = folder_of(store, "data") / "data.parquet"
    cut(data)
    for read in (frames.read, lambda path: frames.take(path, [0]), lambda path: list(frames.windows(path))):
        with pytest.raises(DataError, match="damaged one"):
            read(data)


def test_a_store_of_an_older_version_is_named_in_one_line(store: Store) -> None:
    """Which is one with stages and without the mark of the layout; the first stage that is made writes the mark."""
    (store.root / MARK).unlink()
    for stage in ("synthesize", "filter"):
        shutil.rmtree(folder_of(store, stage))
    _, said = walk(recipes.load("miniature", RECIPE), store)
    assert said == [f"the store {store.root} is of an older version: its stages have other keys and are made again"]
    assert (store.root / MARK).is_file()
