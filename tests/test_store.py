"""The store: complete or absent, resumable, exact about what it holds."""

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.core import provenance
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import require_room
from pipelines.core.store import DAMAGED, MANIFEST, Store
from tests.services.conftest import wait_for


def nothing():
    """No one waits."""


def make(store, key="k1", text="rows", waiting=nothing):
    return store.make("data", key, lambda folder: (folder / "data.txt").write_text(text) and None, {}, waiting)


def await_file(path):
    wait_for(path.exists, 60, path)


def test_a_stage_is_made_once_and_equal_content_has_an_equal_manifest(tmp_path):
    store = Store(tmp_path)
    assert make(store, text="first") == make(store, text="second")
    assert (store.folder("data", "k1") / "data.txt").read_text() == "first"
    here, there = Store(tmp_path / "a"), Store(tmp_path / "b")
    make(here)
    make(there)
    assert here.manifest("data", "k1") == there.manifest("data", "k1")


def test_a_cached_stage_has_the_time_of_its_last_use(tmp_path):
    """Garbage collection goes by it, also for what no recipe's stage is: an evaluation, a GGUF file's folder."""
    store = Store(tmp_path)
    folder = make(store)
    os.utime(folder, (0, 0))
    make(store)
    assert folder.stat().st_mtime > 0


def test_the_manifest_lists_every_file_with_its_digest(tmp_path):
    store = Store(tmp_path)
    make(store)
    files = store.manifest("data", "k1")["files"]
    assert list(files) == ["data.txt"]
    assert files["data.txt"]["bytes"] == 4
    assert files["data.txt"]["sha256"] == hashlib.sha256(b"rows").hexdigest()
    (name,) = store.made()
    assert store.damage(*name, whole=True) == []
    (store.folder(*name) / "data.txt").write_text("rowz")
    assert store.damage(*name, whole=True) == ["data.txt"]


def test_wall_clock_files_are_not_content(tmp_path):
    store = Store(tmp_path)

    def build(folder):
        (folder / "timing.jsonl").write_text(str(time.time()))

    store.make("data", "k1", build, {"recipe": {"seed": 1}}, nothing)
    assert store.manifest("data", "k1") == {"stage": "data", "key": "k1", "recipe": {"seed": 1}, "files": {}}


def test_what_is_left_of_a_stage_without_its_manifest_is_set_aside_before_the_stage_is_made(tmp_path):
    """An interrupted `rm -r` leaves it so: the new stage could not be renamed into its place."""
    store = Store(tmp_path)
    for number in range(2):
        (make(store, text=f"making {number}") / MANIFEST).unlink()
    folder = make(store, text="whole")
    assert (store.has("data", "k1"), (folder / "data.txt").read_text()) == (True, "whole")
    aside = sorted(path for path in folder.parent.iterdir() if path.name.startswith(DAMAGED))
    found = [(path.name, (path / "data.txt").read_text()) for path in aside]
    assert found == [(f"{DAMAGED}k1-0", "making 0"), (f"{DAMAGED}k1-1", "making 1")]


def _slow(root, started):
    def build(folder):
        started.touch()
        time.sleep(60)

    Store(root).make("data", "k1", build, {}, nothing)


def _quick(root):
    make(Store(root), waiting=(root / "waits").touch)


def test_kill_9_frees_the_stage(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = tmp_path / "started"
    child = context.Process(target=_slow, args=(tmp_path / "store", started))
    child.start()
    await_file(started)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    make(Store(tmp_path / "store"))
    assert Store(tmp_path / "store").has("data", "k1")


def test_a_second_run_waits_for_the_first_and_takes_its_result(tmp_path):
    store = Store(tmp_path)
    other = multiprocessing.get_context("spawn").Process(target=_quick, args=(tmp_path,))

    def build(folder):
        other.start()
        await_file(tmp_path / "waits")  # the other one has found the lock
        (folder / "data.txt").write_text("ours")

    store.make("data", "k1", build, {}, nothing)
    other.join()
    assert other.exitcode == 0
    assert (store.folder("data", "k1") / "data.txt").read_text() == "ours"


def test_who_waited_for_a_lock_has_it_though_its_holder_unlinked_the_file(tmp_path):
    store, building, other_waits = Store(tmp_path), threading.Event(), threading.Event()

    def build(folder):
        building.set()
        assert other_waits.wait(10), "another run is not kept out"

    with ThreadPoolExecutor() as pool:
        waits = threading.Event()
        store.folder("data", "k1").parent.mkdir()
        with store.locked("data", "k1", nothing):
            first = pool.submit(store.make, "data", "k1", build, {}, waits.set)
            assert waits.wait(60)
        assert building.wait(60)
        second = pool.submit(make, store, waiting=other_waits.set)
        first.result()
        second.result()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["k1"]  # no lock file is left


def test_a_damaged_manifest_and_too_small_a_disk_are_named(tmp_path):
    store = Store(tmp_path)
    make(store)
    (store.folder("data", "k1") / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest.json is missing or damaged"):
        store.manifest("data", "k1")
    with pytest.raises(ResourceError, match=r"only \d+ MiB free"):
        require_room(tmp_path, 10**12)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    """It would be set aside and made again, though another user may read it."""
    store = Store(tmp_path)
    store.make("sft", "k", lambda folder: (folder / "weights").write_text("w") and None, {}, lambda: None)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pipelines.core.store.cached_digest", denied)
    with pytest.raises(ResourceError, match=r"cannot read .*weights: Permission denied\. Give this user the right"):
        store.damage("sft", "k", whole=True)


def test_who_may_read_a_stage_may_read_what_a_library_wrote_for_its_user_alone(tmp_path):
    def build(folder):
        (folder / "weights").touch(mode=0o600)

    folder = Store(tmp_path).make("sft", "k", build, {}, lambda: None)
    assert (folder / "weights").stat().st_mode & 0o777 == 0o600 | (folder.stat().st_mode & 0o444)


INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8488C
"""
AMD = "model name : AMD EPYC\nflags : fpu avx avx2 fma\n"
ARM = "processor : 0\nFeatures : fp asimd sve\n"


@pytest.mark.parametrize(
    ("told", "processor"),
    [(INTEL, "Intel(R) Xeon(R) Platinum 8488C, amx_bf16"), (AMD, "AMD EPYC, avx2"), (ARM, "sve"), ("", ""), (None, "")],
)
def test_the_processor_is_told(told, processor, tmp_path, monkeypatch):
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(provenance, "PROCESSOR", tmp_path / "cpuinfo")
    provenance.facts.cache_clear()
    facts = provenance.facts()
    provenance.facts.cache_clear()
    assert facts["machine"]["processor"] == processor
    assert provenance.as_tags(facts)["machine"].endswith(f" ({processor})" if processor else " processors")
