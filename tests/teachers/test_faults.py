"""A teacher that fails in 30 of 100 requests: the same dataset as without faults, and no answer paid twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from teacher_world import KEY, kept, make, recipe_of

from pipelines.core.errors import BoundaryError, ResourceError
from pipelines.core.store import Store
from pipelines.endpoints import limits

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import sys
sys.path.insert(0, sys.argv[3])
from teacher_world import kept, make, recipe_of
from pathlib import Path
from pipelines.core.store import Store
make(recipe_of(int(sys.argv[2])), Store(Path(sys.argv[1])), "synthesize")
"""


def answers(store: Path) -> list[str]:
    """The keys in the log of answers, in order."""
    return [row["key"] for row in kept(store)]


def seed_of(key: str) -> int:
    """The seed that the request of a key carries."""
    return int(key[:8], 16) >> 1


def resident() -> int:
    """Memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") // 2**20


def both(
    tmp_path: Path, databases: int, servers: Any, replies: Any, name: Any, timeout_s: float, *more: str
) -> tuple[Any, int]:
    """Synthesise without and with faults; check all that must hold, and return the faulty server and MiB that grew."""
    recipe = recipe_of(databases, *more)
    clean, faulty = Store(tmp_path / "clean"), Store(tmp_path / "faulty")
    say = replies(recipe, clean)
    make(recipe, faulty, "data")
    whole = servers(say)
    name(whole)
    expected = (make(recipe, clean, "synthesize") / "data.parquet").read_bytes()
    broken = servers(say, fault_rate=0.3)
    name(broken, timeout_s=timeout_s)
    before = resident()
    made = make(recipe, faulty, "synthesize")
    grown = resident() - before
    assert (made / "data.parquet").read_bytes() == expected
    assert (made / "metrics.json").read_bytes() == (clean.folder("synthesize", made.name) / "metrics.json").read_bytes()
    assert max(broken.delivered.values()) == 1, broken.delivered.most_common(3)
    assert broken.delivered.keys() == whole.delivered.keys()
    assert sorted(answers(faulty.root)) == sorted(set(answers(clean.root)))
    return broken, grown


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_server_faults_do_not_change_the_dataset(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.02)
    broken, _ = both(tmp_path, 2, servers, replies, name_endpoint, 3.0)
    assert len(broken.faults) >= 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_questions_with_faults(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.05)
    broken, grown = both(tmp_path, 84, servers, replies, name_endpoint, 60.0, "synthesis.teacher.concurrency=64")
    asked = sum(broken.delivered.values()) + sum(broken.faults.values())
    assert 0.25 < sum(broken.faults.values()) / asked < 0.35
    assert len(broken.faults) == 7
    assert grown < 64  # MiB, of the second of two equal runs


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_five_times_it_ends_with_the_same_dataset(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any
) -> None:
    recipe, databases = recipe_of(20), 20
    clean, killed = Store(tmp_path / "clean"), Store(tmp_path / "killed")
    say = replies(recipe, clean)
    make(recipe, killed, "data")
    whole = servers(say)
    name_endpoint(whole)
    expected = (make(recipe, clean, "synthesize") / "data.parquet").read_bytes()
    slow = servers(say, latency_s=0.1)
    name_endpoint(slow)
    lost, checked = 0, list[tuple[int, set[int]]]()
    for kill in range(5):
        target = (kill + 1) * len(whole.delivered) // 7
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(killed.root), str(databases), str(Path(__file__).parent)], cwd=ROOT
        )
        while len(slow.delivered) < target and child.poll() is None:
            time.sleep(0.005)
        assert child.poll() is None, "it was to be killed, and ended"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        time.sleep(1.0)  # the server reads what the dead one had sent
        bought = answers(killed.root)
        assert 0 <= len(slow.seeds) - lost - len(bought) <= 16, "more than was in flight is unaccounted for"
        lost = len(slow.seeds) - len(bought)
        checked.append((len(slow.seeds), {seed_of(key) for key in bought}))
    made = make(recipe, killed, "synthesize")
    assert (made / "data.parquet").read_bytes() == expected
    bought = answers(killed.root)
    assert len(bought) == len(set(bought)) == len(whole.seeds)  # each answer is kept once
    assert len(slow.seeds) == len(whole.seeds) + lost  # calls made: those needed, and those that died with the process
    for place, known in checked:  # no answer in the log is ever asked for again
        assert not known & set(slow.seeds[place:])


def test_the_endpoint_key_is_in_no_file_and_no_log(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, store = recipe_of(1), Store(tmp_path / "store")
    server = servers(replies(recipe, store))
    name_endpoint(server)
    caplog.set_level("DEBUG")
    make(recipe, store, "filter")
    assert KEY.encode() in server.headers[0]  # it was used
    assert KEY not in caplog.text
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert any(path.name == "card.md" for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_second_recipe_pays_nothing_for_the_same_questions(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any
) -> None:
    recipe, store = recipe_of(1), Store(tmp_path / "store")
    server = servers(replies(recipe, store))
    name_endpoint(server)
    first = make(recipe, store, "synthesize")
    asked = sum(server.delivered.values())
    other = recipe_of(1, "synthesis.teacher.concurrency=3")
    second = make(other, store, "synthesize")
    assert second != first
    assert (second / "data.parquet").read_bytes() == (first / "data.parquet").read_bytes()
    assert sum(server.delivered.values()) == asked


def test_the_cap_stops_cleanly_and_a_higher_one_goes_on(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any
) -> None:
    recipe, store = recipe_of(1), Store(tmp_path / "store")
    server = servers(replies(recipe, store))
    name_endpoint(server, price_in=1000, price_out=2000, cap_cost=4.0, currency="EUR")
    with pytest.raises(ResourceError, match=r"has spent \d\.\d\d of 4\.00 EUR.*Raise it in the entry 'teacher'"):
        make(recipe, store, "synthesize")
    paid = sum(server.delivered.values())
    assert 0 < paid == len(answers(store.root))
    name_endpoint(server, price_in=1000, price_out=2000)
    made = make(recipe, store, "synthesize")
    assert set(server.delivered.values()) == {1}
    cost = json.loads((made / "costs.json").read_text())["teacher"]
    assert cost["answers"] == sum(server.delivered.values())
    assert cost["cost"] == pytest.approx((cost["prompt_tokens"] + 2 * cost["completion_tokens"]) / 1e3)


def test_an_episode_that_the_endpoint_fails_is_no_part_of_a_finished_dataset(
    tmp_path: Path, servers: Any, replies: Any, name_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One conversation never works: the stage does not end, and ends as if nothing had been once it does."""
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    recipe = recipe_of(1)
    clean, store = Store(tmp_path / "clean"), Store(tmp_path / "store")
    say = replies(recipe, clean)
    make(recipe, store, "data")
    asked: list[str] = []

    def noting(messages: list[dict[str, str]]) -> str:
        asked.append(messages[-1]["content"])
        return str(say(messages))

    whole = servers(noting)
    name_endpoint(whole)
    expected = (make(recipe, clean, "synthesize") / "data.parquet").read_bytes()
    server = servers(say)
    server.sick = asked[0]  # the first turn of one question
    name_endpoint(server, retries=2)
    for _ in range(2):  # it was not cached
        with pytest.raises(BoundaryError, match=r"failed on 1 episodes, each tried 3 times.*Run again"):
            make(recipe, store, "synthesize")
    server.sick = None
    assert (make(recipe, store, "synthesize") / "data.parquet").read_bytes() == expected
    assert set(server.delivered.values()) == {1}
    assert server.delivered.keys() == whole.delivered.keys()
