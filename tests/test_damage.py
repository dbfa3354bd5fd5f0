"""A damaged stage is noticed, set aside and made again; a full disk is one plain line, and the next run goes on."""

import shutil
import sqlite3
from pathlib import Path

import polars as pl
import pytest

from pipelines.core import files, frames
from pipelines.core.errors import BoundaryError, DataError, ResourceError
from pipelines.core.files import disk_full, read_json, replacing, write_atomic
from pipelines.core.store import DAMAGED, MANIFEST, MARK, Store
from pipelines.nightly import inbox
from pipelines.nightly.ledger import Ledger
from pipelines.recipe import recipes
from pipelines.recipe.config import Nightly
from pipelines.stages import graph, stage_making, train
from pipelines.stages.context import Silent

SMALL = [f"data.{pool}.options={{databases: 1, questions: 3}}" for pool in ("sft", "dev", "test.0")]
RECIPE = (*SMALL, "data.rl=[]", "rollout.processes=1", "stages=[data, synthesize, filter]")


def walk(recipe, store):
    progress, said, steps = Silent(), [], graph.plan(recipe, store)
    progress.say = said.append
    return {step.name: stage_making.execute(step, recipe, store, progress, steps) for step in steps}, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("damage") / "store"
    walk(recipes.load("miniature", RECIPE), Store(root))
    return root


@pytest.fixture
def store(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "store", symlinks=True)
    return Store(tmp_path / "store")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder_of(store, stage):
    (key,) = [key for kind, key in store.made() if kind == stage]
    return store.folder(stage, key)


def test_a_flipped_bit_is_noticed_by_the_stage_that_reads_it(store):
    data = folder_of(store, "synthesize") / "data.parquet"
    whole = data.read_bytes()
    flip(data)
    shutil.rmtree(folder_of(store, "filter"))
    _, said = walk(recipes.load("miniature", RECIPE), store)
    key = data.parent.name
    assert said == [f"synthesize/{key} is damaged (data.parquet): set aside as {DAMAGED}{key}-0"]
    assert data.read_bytes() == whole
    assert (store.root / "synthesize" / f"{DAMAGED}{key}-0").is_dir()


def test_every_cut_file_of_every_stage_is_made_again(finished, tmp_path):
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


def test_flipped_bits_in_weights_are_noticed_before_training(tmp_path, monkeypatch):
    trained = []

    def fake(ctx):
        trained.append(ctx.stage)
        (ctx.folder / "model").mkdir(exist_ok=True)
        (ctx.folder / "model" / "model.safetensors").write_bytes(bytes(4096))
        ctx.metrics({})

    for name in ("model", "sft", "grpo"):
        monkeypatch.setattr(train, name, fake)
    monkeypatch.setattr("pipelines.stages.filter_stage.filter_trajectories", lambda ctx: ctx.metrics({}))
    monkeypatch.setattr("pipelines.stages.synthesize.synthesize", lambda ctx: ctx.metrics({}))
    monkeypatch.setattr("pipelines.stages.data.build_pools", lambda ctx: ctx.metrics({}))
    monkeypatch.setattr("pipelines.stages.prompt_fit.require_fit", lambda recipe, folders: ())
    store = Store(tmp_path)
    chain = "stages=[data, synthesize, filter, sft, grpo]"
    walk(recipes.load("miniature", [chain]), store)
    flip(folder_of(store, "sft") / "model" / "model.safetensors")
    _, said = walk(recipes.load("miniature", [chain, "grpo.steps=9"]), store)
    assert said[0].startswith("sft/")
    assert trained == ["model", "sft", "grpo", "sft", "grpo"]


def test_a_damaged_stage_that_a_run_was_given_is_named_and_not_made_up(store):
    given = {"synthesize": folder_of(store, "synthesize").name}
    cut(folder_of(store, "synthesize") / "data.parquet")
    shutil.rmtree(folder_of(store, "filter"))
    recipe = recipes.load("miniature", [*RECIPE, "synthesis.samples=2"])  # would make another one
    steps = graph.plan(recipe, store, "filter", given)
    with pytest.raises(DataError, match=r"synthesize/\w+ is damaged or gone, and this run does not make it"):
        stage_making.execute(steps[-1], recipe, store, Silent(), steps)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_one_plain_line(tmp_path, content):
    (tmp_path / "metrics.json").write_bytes(content)
    with pytest.raises(DataError, match=r"metrics.json is damaged: it is not JSON"):
        read_json(tmp_path / "metrics.json")


def test_a_cut_table_is_one_plain_line(store):
    data = folder_of(store, "data") / "data.parquet"
    cut(data)
    for read in (frames.read, lambda path: frames.take(path, [0]), lambda path: list(frames.windows(path))):
        with pytest.raises(DataError, match="damaged one"):
            read(data)


def test_a_store_of_an_older_version_is_named_in_one_line(store):
    """Which is one with stages and without the mark of the layout; the first stage that is made writes the mark."""
    (store.root / MARK).unlink()
    for stage in ("synthesize", "filter"):
        shutil.rmtree(folder_of(store, stage))
    _, said = walk(recipes.load("miniature", RECIPE), store)
    assert said == [f"the store {store.root} is of an older version: its stages have other keys and are made again"]
    assert (store.root / MARK).is_file()


FULL = Path("/dev/full")  # a file of Linux that is always full


def write_text():
    FULL.write_text("x" * 10**6)


def write_parquet():
    pl.DataFrame({"row": range(1000)}).write_parquet(FULL)


def write_database():
    database = sqlite3.connect(":memory:")
    try:
        database.execute("PRAGMA max_page_count = 1")
        database.execute("CREATE TABLE shop (name TEXT)")
    finally:
        database.close()


def wrap():
    try:
        write_text()
    except OSError as error:
        raise BoundaryError("the worker processes kept dying") from error


WRITERS = [write_text, write_parquet, write_database, wrap]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_stage_on_a_full_disk_is_made_by_the_next_run(tmp_path, write):
    store = Store(tmp_path)

    def fails(folder):
        (folder / "shard").write_text("done")
        write()

    with pytest.raises(ResourceError, match=r"^no space left under .*run again"):
        store.make("data", "k1", fails, {}, lambda: None)
    assert not store.has("data", "k1")
    kept = []
    store.make("data", "k1", lambda folder: kept.append((folder / "shard").read_text()), {}, lambda: None)
    assert kept == ["done"]


def test_whatever_fails_on_a_disk_without_room_failed_for_that(tmp_path, monkeypatch):
    died, bad = BoundaryError("the worker processes kept dying"), DataError("a bad row")
    assert disk_full(died, tmp_path) is None
    monkeypatch.setattr(files, "NO_ROOM", 1 << 60)
    assert disk_full(died, tmp_path) is not None
    assert disk_full(bad, tmp_path) is None, "a bad row is bad on any disk"
    assert disk_full(died, tmp_path / "gone") is None


def test_our_own_mistakes_keep_their_traceback(tmp_path):
    def broken(folder):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        Store(tmp_path).make("data", "k1", broken, {}, lambda: None)


def full(monkeypatch, *methods):
    def refuse(path, *arguments, **options):
        raise OSError(28, "No space left on device", str(path))

    for method in methods:
        monkeypatch.setattr(Path, method, refuse)


def test_a_file_beside_the_stages_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "pins.json"
    write_atomic(path, "[]")
    with monkeypatch.context() as patch:
        full(patch, "write_text")
        with pytest.raises(ResourceError, match="no space left"):
            write_atomic(path, "[1]")
    assert path.read_text() == "[]"
    with replacing(path) as first, replacing(path) as second:  # as two containers, whose processes have one number
        first.write_text("[1]")
        second.write_text("[2]")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("pins.json", "[1]")]  # the last one


def test_a_night_on_a_full_disk_leaves_the_ledger_unchanged(tmp_path, monkeypatch):
    ledger = Ledger(Store(tmp_path / "store"), "farms")
    first = ledger.add("night", decision="nothing", reason="no new questions", new=[])
    with monkeypatch.context() as patch:
        full(patch, "open")
        with pytest.raises(ResourceError, match="no space left"):
            ledger.add("night", decision="kept", reason="", new=[])
    assert ledger.lines() == [first]


def test_a_batch_that_cannot_be_frozen_takes_no_row(tmp_path, monkeypatch):
    questions = tmp_path / "inbox"
    questions.mkdir()
    (questions / "new.jsonl").write_text('{"question": "?", "sql": "SELECT 1"}\n')
    settings, batches = Nightly(inbox=str(questions)), tmp_path / "batches"
    opened = Path.open

    def refuse(path, mode="r", **options):
        if mode == "w":
            raise OSError(28, "No space left on device", str(path))
        return opened(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(ResourceError, match="no space left"):
            inbox.freeze_batch(settings, batches)
    batch = inbox.freeze_batch(settings, batches)
    assert batch is not None
    assert len(read_json(batch / inbox.ROWS)) == 1
