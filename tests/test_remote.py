"""Finished stages go to object storage and come back whole; damage and foreign names are refused."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import storing
from pipelines.errors import DataError, ResourceError
from pipelines.remote import Remote, chosen
from pipelines.store import Store


def filled(root: Path) -> Store:
    """Two stages; one with a folder, a link and a side file that is not content."""

    def build(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(bytes(range(256)) * 100)
        (folder / "timing.jsonl").write_text("{}\n")
        (folder / "parts").mkdir()
        (folder / "parts" / "0").symlink_to("../../d1")

    store = Store(root)
    store.make("data", "d1", lambda folder: (folder / "data.txt").write_text("rows") and None, {}, lambda: None)
    store.make("sft", "s1", build, {"inputs": {"data": "d1"}}, lambda: None)
    return store


def there_and_back(url: str, folder: Path) -> None:
    said: list[str] = []
    here = filled(folder / "here")
    storing.push(here, url, [], said.append)
    assert said == ["pushed data/d1", "pushed sft/s1", "2 stages pushed"]
    storing.push(here, url, [], said.append)
    assert said[-1] == "0 stages pushed"
    other = Store(folder / "other")
    storing.pull(other, url, ["sft"], said.append)
    assert said[-2:] == ["pulled sft/s1", "1 stage pulled"]
    assert other.manifest("sft", "s1") == here.manifest("sft", "s1")
    (entry,) = other.entries()
    assert other.verify(entry) == []
    assert (entry.folder / "model" / "weights.bin").read_bytes() == bytes(range(256)) * 100
    assert (entry.folder / "timing.jsonl").read_text() == "{}\n"
    assert os.readlink(entry.folder / "parts" / "0") == "../../d1"


def test_a_folder_as_object_storage(tmp_path: Path) -> None:
    there_and_back(f"file://{tmp_path}/there", tmp_path)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real S3 server of moto on a port of its own, with a bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from .services.conftest import free_port

    port = free_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(
                    urllib.request.Request(f"http://127.0.0.1:{port}/sqltrain", method="PUT"), timeout=5
                ).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.3)
        yield "s3://sqltrain"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.services
def test_an_s3_server(bucket: str, tmp_path: Path) -> None:
    there_and_back(f"{bucket}/store", tmp_path)


@pytest.mark.services
def test_a_bucket_that_is_not_there_is_one_plain_line(bucket: str) -> None:
    with pytest.raises(ResourceError, match="s3://nowhere") as caught:
        Remote("s3://nowhere/x").push(Store(Path("/none")), "data", "d1")
    assert "\n" not in str(caught.value)


def test_damage_on_the_way_is_refused_and_leaves_no_stage(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    storing.push(filled(tmp_path / "here"), url, [], lambda line: None)
    (tmp_path / "there" / "data" / "d1" / "data.txt").write_text("rowz")
    other = Store(tmp_path / "other")
    with pytest.raises(DataError, match=r"data\.txt of data/d1 is damaged"):
        storing.pull(other, url, ["data"], lambda line: None)
    assert not other.has("data", "d1")


def test_a_name_that_points_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    storing.push(filled(tmp_path / "here"), url, [], lambda line: None)
    (tmp_path / "there" / "data" / "d1" / "links.json").write_text(json.dumps({"../../../escaped": "/etc"}))
    with pytest.raises(DataError, match="points out"):
        storing.pull(Store(tmp_path / "other"), url, ["data"], lambda line: None)
    assert not (tmp_path / "escaped").is_symlink()


def test_names_choose_stages() -> None:
    names = [("data", "d1"), ("data", "d2"), ("sft", "s1")]
    assert chosen(names, [], "here") == names
    assert chosen(names, ["data"], "here") == names[:2]
    assert chosen(names, ["sft/s", "data/d2"], "here") == [("data", "d2"), ("sft", "s1")]
    with pytest.raises(DataError, match=r"here has no stage 'grpo'\. It has: data, sft\."):
        chosen(names, ["grpo"], "here")
    with pytest.raises(DataError, match="there has no finished stage"):
        chosen([], [], "there")


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("bucket", DataError, r"'bucket' is no URL.*Write s3://BUCKET/FOLDER"),
        ("nosuch://x", ResourceError, r"no file system for nosuch://x: Protocol not known: nosuch"),
    ],
)
def test_an_address_that_cannot_be_is_said_plainly(url: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        Remote(url)
    assert "\n" not in str(caught.value)
