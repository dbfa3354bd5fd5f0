"""Finished stages go to object storage and come back whole; damage and foreign names are refused."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.commands import operate
from pipelines.core.errors import DataError, ResourceError, SqltrainError
from pipelines.core.store import Store
from pipelines.core.store_remote import Remote, select_stages
from pipelines.nightly import store_gc
from pipelines.nightly.store_transfer import pull_stages, push_stages
from tests.services.conftest import wait_for


def filled(root):
    def build(folder):
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(bytes(range(256)) * 100)
        (folder / "timing.jsonl").write_text("{}\n")
        (folder / "parts").mkdir()
        (folder / "parts" / "0").symlink_to("../../d1")

    store = Store(root)
    store.make("data", "d1", lambda folder: (folder / "data.txt").write_text("rows") and None, {}, lambda: None)
    store.make("sft", "s1", build, {"inputs": {"data": "d1"}}, lambda: None)
    return store


def contents(folder):
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    values = {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}
    return {str(path.relative_to(folder)): value for path, value in values.items()}


SAID = ["pushed data/d1", "pushed sft/s1", "2 stages pushed", "0 stages pushed", "pulled sft/s1", "1 stage pulled"]
SENT = {"model/weights.bin": bytes(range(256)) * 100, "timing.jsonl": b"{}\n", "parts/0": "../../d1"}


@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.services)])
def test_a_pushed_stage_is_pulled_with_the_same_files_and_links(request, tmp_path, place):
    url = f"{request.getfixturevalue('bucket')}/store" if place == "s3" else f"file://{tmp_path}/there"
    here, other, said = filled(tmp_path / "here"), Store(tmp_path / "other"), []
    push_stages(here, url, [], said.append)
    push_stages(here, url, [], said.append)
    pull_stages(other, url, ["sft"], said.append)
    assert contents(other.folder("sft", "s1")) == contents(here.folder("sft", "s1"))
    assert said == SAID
    assert list(other.made()) == [("sft", "s1")]
    assert contents(other.folder("sft", "s1")).items() > SENT.items()
    assert other.damage("sft", "s1", whole=True) == []


def test_a_changed_contract_leaves_a_pulled_stage_sound(tmp_path, capsys):
    """Two machines: the verdict is written after a stage is sealed, travels with it, and other thresholds change it."""
    here, other, url = filled(tmp_path / "here"), Store(tmp_path / "other"), f"file://{tmp_path}/there"
    (here.folder("data", "d1") / "contract.json").write_text('{"terms": 1}')
    (here.folder("data", "d1") / "contract.html").write_text("<p>1</p>")
    push_stages(here, url, [], lambda line: None)
    pull_stages(other, url, [], lambda line: None)
    assert contents(other.folder("data", "d1")) == contents(here.folder("data", "d1"))
    (other.folder("data", "d1") / "contract.json").write_text('{"terms": "other"}')
    said = []
    operate.verify(str(other.root))
    assert capsys.readouterr().out == "2 stages, 0 damaged\n"
    for store in (other, here):
        push_stages(store, url, [], said.append)
    assert said == ["0 stages pushed", "0 stages pushed"]


def test_a_stage_that_two_machines_made_otherwise_is_pushed_by_the_first_alone(tmp_path):
    said = []
    here, other, url = filled(tmp_path / "here"), Store(tmp_path / "other"), f"file://{tmp_path}/there"
    other.make("data", "d1", lambda folder: (folder / "data.txt").write_text("sorw") and None, {}, lambda: None)
    for store in (here, other, here):
        push_stages(store, url, ["data"], said.append)
    left = "not pushed: data/d1 is whole there, with another manifest than here"
    assert said == ["pushed data/d1", "1 stage pushed", left, "0 stages pushed", "0 stages pushed"]
    assert (tmp_path / "there" / "data" / "d1" / "data.txt").read_text() == "rows"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_stage_too_large_for_the_disk_does_not_keep_the_others_from_coming(tmp_path, is_there):
    """Its manifest claims 10**15 bytes; the file there has 4, or it has them (a hole that takes no room)."""
    said = []
    url, other, folder = f"file://{tmp_path}/there", Store(tmp_path / "other"), tmp_path / "there" / "data" / "d1"
    push_stages(filled(tmp_path / "here"), url, [], lambda line: None)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["data.txt"]["bytes"] = size = 10**13 if is_there else 10**15
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if is_there:
        os.truncate(folder / "data.txt", size)
    why = r"only \d+ MiB free" if is_there else "has 4 bytes, and its manifest says 1000"
    with pytest.raises(DataError, match=why):
        pull_stages(other, url, [], said.append)
    assert said[0].startswith("not pulled: data/d1: ")
    assert said[1:] == ["pulled sft/s1", "1 stage pulled"]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from pipelines.core.processes import free_port

    port = free_port()
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    try:

        def is_up():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(is_up, 120, "the server is up")
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/sqltrain", method="PUT")).close()
        yield "s3://sqltrain"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.services
def test_a_missing_bucket_is_reported_in_one_line(bucket):
    with pytest.raises(ResourceError, match="s3://nowhere") as caught:
        Remote("s3://nowhere/x").push(Store(Path("/none")), "data", "d1")
    assert "\n" not in str(caught.value)


def test_a_damaged_stage_is_not_pushed_and_the_others_are(tmp_path):
    here, said = filled(tmp_path / "here"), []
    (here.folder("data", "d1") / "data.txt").write_text("rowz")
    with pytest.raises(SqltrainError, match="1 stage damaged here and not pushed") as caught:
        push_stages(here, f"file://{tmp_path}/there", [], said.append)
    assert caught.value.exit_code == 1
    assert said == ["damaged, not pushed: data/d1 (data.txt)", "pushed sft/s1", "1 stage pushed"]
    assert not (tmp_path / "there" / "data").exists()


@pytest.mark.parametrize("name", ["data.txt", "manifest.json", "links.json"])
def test_a_stage_that_differs_there_is_pushed_again(tmp_path, name):
    here, url, said = filled(tmp_path / "here"), f"file://{tmp_path}/there", []
    push_stages(here, url, [], lambda line: None)
    path = tmp_path / "there" / "data" / "d1" / name
    whole = path.read_bytes()
    path.unlink() if name == "links.json" else path.write_bytes(whole.replace(b"rows", b"row").replace(b"d1", b"d2"))
    push_stages(here, url, [], said.append)
    assert said == ["pushed data/d1", "1 stage pushed"]
    assert path.read_bytes() == whole


def test_a_stage_that_cannot_be_pulled_does_not_keep_the_others_from_coming(tmp_path):
    said = []
    url, other = f"file://{tmp_path}/there", Store(tmp_path / "other")
    push_stages(filled(tmp_path / "here"), url, [], lambda line: None)
    (tmp_path / "there" / "data" / "d1" / "links.json").unlink()
    with pytest.raises(DataError, match=r"links\.json is refused: it is missing"):
        pull_stages(other, url, [], said.append)
    assert said[0].startswith("not pulled: data/d1: ")
    assert said[1:] == ["pulled sft/s1", "1 stage pulled"]
    (tmp_path / "there" / "sft" / "s1" / "model" / "weights.bin").unlink()
    with pytest.raises(DataError, match=r"2 stages not pulled; the first: .*links\.json") as caught:
        pull_stages(Store(tmp_path / "third"), url, [], said.append)
    assert "\n" not in str(caught.value)


def test_a_damaged_stage_is_set_aside_and_pulled(tmp_path):
    here, url, said = filled(tmp_path / "here"), f"file://{tmp_path}/there", []
    push_stages(here, url, [], lambda line: None)
    (here.folder("data", "d1") / "data.txt").write_text("rowz")
    pull_stages(here, url, [], said.append)
    assert said == ["data/d1 is damaged (data.txt): set aside as .damaged-d1-0", "pulled data/d1", "1 stage pulled"]
    assert here.damage("data", "d1", whole=True) == []


def test_names_choose_stages():
    names = [("data", "d1"), ("data", "d2"), ("sft", "s1")]
    assert select_stages(names, [], "here") == names
    assert select_stages(names, ["data"], "here") == names[:2]
    assert select_stages(names, ["sft/s", "data/d2"], "here") == [("data", "d2"), ("sft", "s1")]
    with pytest.raises(DataError, match=r"here has no stage 'grpo'\. It has: data, sft\."):
        select_stages(names, ["grpo"], "here")
    with pytest.raises(DataError, match="there has no finished stage"):
        select_stages([], [], "there")


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("bucket", DataError, r"'bucket' is no URL.*Write s3://BUCKET/FOLDER"),
        ("nosuch://x", ResourceError, r"no file system for nosuch://x: Protocol not known: nosuch"),
    ],
)
def test_an_address_that_cannot_be_is_said_plainly(url, error, said):
    with pytest.raises(error, match=said) as caught:
        Remote(url)
    assert "\n" not in str(caught.value)


HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of no bytes
ABOVE = {"../../../escaped": {"bytes": 0, "sha256": HASH}}


@pytest.mark.parametrize(
    ("manifest", "links", "said"),
    [
        ({}, {"../../../escaped": "/etc"}, "points out"),
        ({}, {"/etc/escaped": "/etc"}, "points out"),
        ({}, {"databases/../../../escaped": "/etc"}, "points out"),
        ({}, {"data.txt": "/etc/passwd"}, "points out"),
        ({}, {"databases": "/etc"}, "points out"),
        ({}, {"databases/a\0b": "/etc"}, "points out"),
        ({}, {"databases/a": 7}, "leads nowhere"),
        ({}, {"parts/0": "../../../../../etc"}, "points out of the store"),
        ({}, {"databases/a": "/tmp", "databases/a/b": "/etc"}, "stands where a file is to lie"),
        ({}, {f"databases/{'a' * 300}": "/etc"}, "points out"),
        ({}, [], "no mapping"),
        ({"files": ABOVE}, {}, "points out"),
        ({"files": {"/etc/escaped": {"bytes": 0, "sha256": HASH}}}, {}, "points out"),
        ({"files": {"a\x1b[2Jb": {"bytes": 4, "sha256": HASH}}}, {}, "points out"),  # a terminal would run it
        ({"files": {"data.txt": {"bytes": 10**18, "sha256": HASH}}}, {}, "has 4 bytes, and its manifest says 1000"),
        ({"files": {"data.txt": {"bytes": -1, "sha256": HASH}}}, {}, "no size or digest"),
        ({"files": {"data.txt": {"bytes": 1, "sha256": HASH}}}, {}, "has 4 bytes, and its manifest says 1"),
        ({"files": {"data.txt": {"bytes": 4, "sha256": HASH}}}, {}, r"data\.txt of data/d1 is damaged"),
        ({"files": [1]}, {}, "lists no files"),
        ({"stage": "sft"}, {}, "another stage's"),
    ],
)
def test_a_hostile_remote_writes_no_file_outside_the_stage(tmp_path, manifest, links, said):
    there, other = tmp_path / "there", Store(tmp_path / "other")
    push_stages(filled(tmp_path / "here"), f"file://{there}", ["data"], lambda line: None)
    folder = there / "data" / "d1"
    (folder / "manifest.json").write_text(json.dumps(json.loads((folder / "manifest.json").read_text()) | manifest))
    (folder / "links.json").write_text(json.dumps(links))
    with pytest.raises((DataError, ResourceError), match=said) as caught:
        pull_stages(other, f"file://{there}", ["data"], lambda line: None)
    assert "\n" not in str(caught.value)
    assert not other.has("data", "d1")
    assert not list(tmp_path.rglob("escaped"))


def test_a_file_below_another_file_is_refused_in_one_line(tmp_path, monkeypatch):
    """Object storage may have both names."""
    url = f"file://{tmp_path}/there"
    push_stages(filled(tmp_path / "here"), url, ["data"], lambda line: None)
    path = tmp_path / "there" / "data" / "d1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["data.txt/x/y"] = {"bytes": 0, "sha256": HASH}
    path.write_text(json.dumps(manifest))
    listed = Remote.files_below
    monkeypatch.setattr(Remote, "files_below", lambda remote, place: listed(remote, place) | {"data.txt/x/y": 0})
    with pytest.raises(DataError, match=r"'data\.txt/x/y' points out of its folder"):
        pull_stages(Store(tmp_path / "other"), url, ["data"], lambda line: None)


def test_a_pull_does_not_write_through_a_link_that_an_earlier_pull_left(tmp_path):
    """A link in the work folder, planted by a pull that was refused, leads a second pull's file out of the store."""
    push_stages(filled(tmp_path / "here"), f"file://{tmp_path}/there", ["sft"], lambda line: None)
    other, outside = Store(tmp_path / "other"), tmp_path / "outside"
    outside.mkdir()
    other.work("sft", "s1").mkdir(parents=True)
    (other.work("sft", "s1") / "model").symlink_to(outside)
    pull_stages(other, f"file://{tmp_path}/there", ["sft"], lambda line: None)
    assert not list(outside.iterdir())
    assert other.damage("sft", "s1", whole=True) == []


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_pull_takes_the_place_of_unfinished_work_only_if_it_is_whole(tmp_path, is_damaged):
    """Another run has trained there for hours."""
    url, other = f"file://{tmp_path}/there", Store(tmp_path / "other")
    push_stages(filled(tmp_path / "here"), url, ["data"], lambda line: None)
    if is_damaged:
        (tmp_path / "there" / "data" / "d1" / "data.txt").write_text("rowz")
    checkpoint = other.work("data", "d1") / "checkpoint-90" / "optimizer.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("hours")
    if is_damaged:
        with pytest.raises(DataError, match=r"data\.txt of data/d1 is damaged"):
            pull_stages(other, url, ["data"], lambda line: None)
        assert checkpoint.read_text() == "hours"
    else:
        pull_stages(other, url, ["data"], lambda line: None)
        assert other.damage("data", "d1", whole=True) == []
    left = {path.name for path in (other.root / "data").iterdir() if path.is_dir()}
    assert left == ({".work-d1"} if is_damaged else {"d1"})


def test_gc_does_not_take_a_download_away(tmp_path, monkeypatch):
    url, other = f"file://{tmp_path}/there", Store(tmp_path / "other")
    push_stages(filled(tmp_path / "here"), url, ["data"], lambda line: None)
    get, found = Remote.get, list[Path]()

    def get_during_gc(remote, name, path):
        get(remote, name, path)
        found.extend(candidate.folder for candidate in store_gc.gc_candidates(other, -1))

    monkeypatch.setattr(Remote, "get", get_during_gc)
    pull_stages(other, url, ["data"], lambda line: None)
    assert (found, other.damage("data", "d1", whole=True)) == ([], [])


def test_a_pull_says_that_it_waits_for_a_run_and_fetches_nothing_that_this_made(tmp_path, caplog):
    url, other = f"file://{tmp_path}/there", Store(tmp_path / "other")
    push_stages(filled(tmp_path / "here"), url, ["data"], lambda line: None)
    with ThreadPoolExecutor() as pool:
        with other.making("data", "d1", lambda: None) as work:
            assert work is not None
            waiting = pool.submit(Remote(url).pull, other, "data", "d1")
            wait_for(lambda: caplog.messages, 60, "it waits")
            (work / "manifest.json").write_text("{}")
            (work / "data.txt").write_text("ours")
        assert waiting.result() is False
    assert caplog.messages == ["data/d1: another run is making it; waiting"]
    assert (other.folder("data", "d1") / "data.txt").read_text() == "ours"
    assert Remote(url).pull(Store(tmp_path / "third"), "data", "d1") is True


def test_a_file_that_no_manifest_lists_is_not_fetched(tmp_path):
    push_stages(filled(tmp_path / "here"), f"file://{tmp_path}/there", ["sft"], lambda line: None)
    (tmp_path / "there" / "sft" / "s1" / "model" / "modeling_evil.py").write_text("import os")
    (tmp_path / "there" / "sft" / "...").mkdir()
    (tmp_path / "there" / "sft" / "..." / "manifest.json").write_text("{}")
    other = Store(tmp_path / "other")
    pull_stages(other, f"file://{tmp_path}/there", [], lambda line: None)
    assert sorted(path.name for path in other.folder("sft", "s1").rglob("*")) == [
        "0", "manifest.json", "model", "parts", "timing.jsonl", "weights.bin",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"7"])
def test_a_broken_manifest_of_the_remote_is_refused(tmp_path, content):
    push_stages(filled(tmp_path / "here"), f"file://{tmp_path}/there", ["data"], lambda line: None)
    (tmp_path / "there" / "data" / "d1" / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match="is refused"):
        pull_stages(Store(tmp_path / "other"), f"file://{tmp_path}/there", [], lambda line: None)
