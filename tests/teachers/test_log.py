"""The log of answers: kept at once, found again by anybody, never bought twice."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.core.errors import ResourceError
from pipelines.endpoints.log import ResponseLog

ROOT = Path(__file__).resolve().parents[2]
A, B = "a" * 32, "b" * 32


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[ResponseLog]]:
    """Two logs of the same file, as two processes have them."""
    made = [ResponseLog(tmp_path, "t"), ResponseLog(tmp_path, "t")]
    yield made
    for log in made:
        log.close()


def child(code: str, root: Path) -> "subprocess.Popen[bytes]":
    """Another process with `log` open."""
    head = "import os, sys; from pathlib import Path; from pipelines.endpoints.log import ResponseLog\n"
    command = [sys.executable, "-c", f"{head}log = ResponseLog(Path(sys.argv[1]), 't')\n{code}", str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_an_appended_answer_is_found_by_the_next_run(tmp_path: Path) -> None:
    log = ResponseLog(tmp_path, "big/teacher")
    log.append(A, (30, 7), {"text": "é\nSELECT 1"})
    log.close()
    again = ResponseLog(tmp_path, "big/teacher")
    assert again.find(A) == {"text": "é\nSELECT 1"}
    assert again.find(B) is None
    assert (again.spent.requests, again.spent.tokens) == (1, 37)
    again.close()
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} == {"big%2Fteacher.sqlite"}


def test_answers_of_another_process_count_after_refresh(logs: list[ResponseLog]) -> None:
    one, other = logs
    one.append(A, (1, 1), {"text": "x"})
    assert other.find(A) == {"text": "x"}
    other.refresh()
    assert other.spent.tokens == 2
    other.append(B, (2, 3), {"text": "y"})
    one.refresh()
    assert (one.spent.requests, one.spent.tokens) == (other.spent.requests, other.spent.tokens) == (2, 7)


def test_an_answer_that_was_paid_for_twice_counts_twice(logs: list[ResponseLog]) -> None:
    """On a file system without locks two machines may both buy it; the first answer is the one that is used."""
    logs[0].append(A, (1, 1), {"text": "x"})
    logs[1].append(A, (2, 2), {"text": "y"})
    assert logs[1].find(A) == {"text": "x"}
    assert logs[1].spent.tokens == 6


def test_a_process_killed_while_it_appends_leaves_whole_answers(tmp_path: Path) -> None:
    """All answers that it reported are there, and at most the one that it was writing besides."""
    code = (
        "number = 0\nwhile True:\n"
        "    log.append(f'{number:032x}', (1, 1), {'text': 'x' * 100_000})\n"
        "    print(number, flush=True); number += 1"
    )
    for _ in range(3):
        writer = child(code, tmp_path)
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.kill()
        reported = 1 + len(writer.communicate()[0].splitlines())
        log = ResponseLog(tmp_path, "t")
        assert log.spent.requests in (reported, reported + 1)
        assert all(log.find(f"{number:032x}") == {"text": "x" * 100_000} for number in range(reported))
        log.append(B, (1, 1), {"text": "y"})
        log.close()
        log.path.unlink()


def test_the_first_process_pays_for_an_answer_and_the_others_wait(logs: list[ResponseLog]) -> None:
    bought = []

    async def ask(number: int) -> str:
        log = logs[number % 2]
        async with log.claim(A) as found:
            if found is None:
                bought.append(number)
                await asyncio.sleep(0.05)
                log.append(A, (1, 1), {"text": f"by {number}"})
                return f"by {number}"
            return str(found["text"])

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(ask(number) for number in range(6)))

    assert asyncio.run(all_at_once()) == ["by 0"] * 6
    assert bought == [0]


def test_a_claim_ends_with_its_holder(tmp_path: Path) -> None:
    holder = child(f"log.take('{A}'); print('held', flush=True)\nsys.stdin.read(); os._exit(9)", tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    log = ResponseLog(tmp_path, "t")
    assert not log.take(A)
    assert log.take(B)
    holder.communicate()
    assert log.take(A)
    log.close()


def test_only_the_owner_may_read_the_response_log(tmp_path: Path) -> None:
    ResponseLog(tmp_path, "t").close()
    assert os.stat(tmp_path / "t.sqlite").st_mode & 0o777 == 0o600


def test_a_file_that_is_not_a_log_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.sqlite").write_text("not a database, although its name says so\n" * 100)
    with pytest.raises(ResourceError, match=re.escape(f"{tmp_path / 't.sqlite'} cannot be used")):
        ResponseLog(tmp_path, "t")


def test_a_file_that_was_shortened_is_refused_in_one_line(tmp_path: Path) -> None:
    log = ResponseLog(tmp_path, "t")
    for number in range(100):
        log.append(f"{number:032x}", (1, 1), {"text": "x" * 1000})
    log.close()
    os.truncate(tmp_path / "t.sqlite", 12_288)
    with pytest.raises(ResourceError, match="cannot be used"):
        ResponseLog(tmp_path, "t").find(f"{99:032x}")


def test_an_answer_that_finds_no_space_is_refused_in_one_line(logs: list[ResponseLog]) -> None:
    logs[0]._table.execute("PRAGMA max_page_count=4")
    with pytest.raises(ResourceError, match="no space left"):
        logs[0].append(A, (1, 1), {"text": "x" * 100_000})
