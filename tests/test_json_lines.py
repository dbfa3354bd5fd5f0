"""JSON lines: only a line feed ends a line, whatever a text within it holds, and a bad line is named."""

from pathlib import Path

import pytest

from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger, decisions, ledgers

ENDS = "\u2028\u2029\u0085"  # str.splitlines takes each of them for the end of a line


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(f'\ufeff{{"a": "b{ENDS}c"}}\r\n\n[1]\n2'.encode())
    assert list(read_lines(path)) == [(1, {"a": f"b{ENDS}c"}), (3, [1]), (4, 2)]
    assert list(read_lines(path, torn=True)) == [(1, {"a": f"b{ENDS}c"}), (3, [1])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', r"line 2: not JSON \(Expecting value"),
        (b"\xff", "line 2 is not UTF-8"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b"9" * 5000, "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        list(read_lines(tmp_path / "x.jsonl", "Mend it."))
    assert caught.value.hint == "Mend it."


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: .*none\.jsonl"):
        list(read_lines(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="cannot read"):
        list(read_lines(tmp_path))


def test_a_ledger_takes_any_character_in_a_reason(tmp_path: Path) -> None:
    book = Ledger(Store(tmp_path), "farms")
    book.add("night", decision="kept", reason=f"no such file: x{ENDS}y.sqlite", new=["0001-a"])
    book.add("night", decision="nothing", reason="", new=[])
    assert [row["reason"] for row in book.lines()] == [f"no such file: x{ENDS}y.sqlite", ""]
    assert decisions(ledgers(Store(tmp_path))["farms"].lines()) == {"0001-a": "kept"}
