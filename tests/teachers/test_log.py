"""The log of answers: kept at once, found again by anybody, never bought twice, whatever tore it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from pipelines.endpoints.log import ResponseLog

A, B = "a" * 32, "b" * 32


def test_what_was_appended_is_found_by_the_next_run(tmp_path: Path) -> None:
    log = ResponseLog(tmp_path, "big/teacher")
    log.append(A, (30, 7), {"text": "é\nSELECT 1"})
    log.close()
    again = ResponseLog(tmp_path, "big/teacher")
    assert again.find(A) == {"key": A, "tokens": [30, 7], "text": "é\nSELECT 1"}
    assert again.find(B) is None
    assert (len(again), again.spent.requests, again.spent.tokens) == (1, 1, 37)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".big%2Fteacher.claims", "big%2Fteacher.jsonl"]
    again.close()


def test_another_log_of_the_same_file_sees_a_new_answer_after_refresh(tmp_path: Path) -> None:
    one, other = ResponseLog(tmp_path, "t"), ResponseLog(tmp_path, "t")
    one.append(A, (1, 1), {"text": "x"})
    assert other.find(A) is None
    other.refresh()
    assert other.find(A) is not None
    assert other.spent.tokens == 2
    one.close()
    other.close()


def test_a_torn_line_is_skipped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    log = ResponseLog(tmp_path, "t")
    log.append(A, (1, 1), {"text": "x"})
    log.close()
    with (tmp_path / "t.jsonl").open("ab") as file:
        file.write(b'{"key":"' + B.encode() + b'","tokens":[5,5],"te')
    log = ResponseLog(tmp_path, "t")
    assert (len(log), log.find(B)) == (1, None)
    log.append(B, (2, 2), {"text": "y"})
    assert log.find(B) == {"key": B, "tokens": [2, 2], "text": "y"}
    assert (len(log), log.spent.requests, log.spent.tokens) == (2, 2, 6)
    log.close()


def test_the_first_process_pays_for_an_answer_and_the_others_wait(tmp_path: Path) -> None:
    logs = [ResponseLog(tmp_path, "t"), ResponseLog(tmp_path, "t")]
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
    for log in logs:
        log.close()


def test_a_claim_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from pipelines.endpoints.log import ResponseLog\n"
        f"log = ResponseLog(Path(sys.argv[1]), 't'); log._take('{A}'); print('held', flush=True)\n"
        "sys.stdin.read(); os._exit(9)"
    )
    root = Path(__file__).resolve().parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    log = ResponseLog(tmp_path, "t")
    assert not log._take(A)
    assert log._take(B)
    holder.communicate()
    assert log._take(A)
    log.close()


def test_only_the_owner_may_read_the_response_log(tmp_path: Path) -> None:
    ResponseLog(tmp_path, "t").close()
    assert os.stat(tmp_path / "t.jsonl").st_mode & 0o777 == 0o600


def test_a_line_torn_in_its_middle_is_bought_again_and_then_found_by_every_run(tmp_path: Path) -> None:
    """Its end looks like a line's; the answer that was bought in its place comes after it."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"key":"' + A.encode() + b'","tokens":[5,5],"calls":[{"x":"}\n')
    log = ResponseLog(tmp_path, "t")
    assert log.find(A) is None
    log.append(A, (2, 2), {"text": "y"})
    assert log.find(A) == {"key": A, "tokens": [2, 2], "text": "y"}
    log.close()
    again = ResponseLog(tmp_path, "t")
    assert again.find(A) == {"key": A, "tokens": [2, 2], "text": "y"}
    assert again.spent.tokens == 14  # the torn one was paid for
    again.close()


def test_a_file_that_was_shortened_holds_no_answer(tmp_path: Path) -> None:
    log = ResponseLog(tmp_path, "t")
    log.append(A, (1, 1), {"text": "x"})
    os.truncate(tmp_path / "t.jsonl", 20)
    assert log.find(A) is None
    log.close()
