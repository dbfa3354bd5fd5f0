"""Records round-trip through JSONL and Parquet; only a line feed ends a line, and a bad line is named."""

import dataclasses

import pytest

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.store import Store
from pipelines.core.types import (
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    StopReason,
    Trajectory,
    Turn,
    from_dict,
    is_abstention,
    read_jsonl,
    to_dict,
    write_jsonl,
)
from pipelines.nightly.ledger import Ledger, decisions, ledgers

EXAMPLE = Example("q1", "how many ?", Database("farm", "sqlite", "farm.db"), "SELECT 1", meta={"family": "é", "n": 2})
TRAJECTORY = Trajectory(
    example_id="q1",
    sample=0,
    policy="oracle",
    protocol="react",
    prompt=(("user", "how many ?"),),
    turns=(
        Turn("<sql> x", Action(ActionKind.INVALID, format_error="unclosed"), "<observation> no </observation>"),
        Turn("s", Action(ActionKind.SOLUTION, "SELECT 1", "think"), None, ExecutionStatus.OK, None, 1),
    ),
    final_sql="SELECT 1",
    stop=StopReason.SOLUTION,
    token_ids=(5, 6, 7),
    agent_mask=(0, 1, 1),
    logprobs=(0.0, -0.5, -0.25),
    turn_ends=(2, 3),
)


@pytest.mark.parametrize("record", [EXAMPLE, TRAJECTORY], ids=["example", "trajectory"])
def test_records_are_read_back_equal_from_jsonl_and_parquet(tmp_path, record):
    kind = type(record)
    write_jsonl(tmp_path / "r.jsonl", [record, record])
    assert list(read_jsonl(tmp_path / "r.jsonl", kind)) == [record, record]
    frames.write(tmp_path / "r.parquet", frames.to_frame([record], extra=[{"pool": "sft"}]))
    frame = frames.read(tmp_path / "r.parquet")
    assert frame["pool"].to_list() == ["sft"]
    assert frames.from_frame(frame, kind) == [record]


def test_equal_records_give_equal_bytes_and_a_trajectory_its_figures(tmp_path):
    for name in ("a", "b"):
        frames.write(tmp_path / name, frames.to_frame([TRAJECTORY] * 50))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert not TRAJECTORY.well_formed  # its first turn is malformed


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "q"}\n')
    with pytest.raises(DataError, match=r"bad field 'question'"):
        list(read_jsonl(path, Example))


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "x.parquet").write_text("rows")
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file"):
        frames.read(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"no such file: .*none\.jsonl"):
        list(read_jsonl(tmp_path / "none.jsonl", Example))
    with pytest.raises(DataError, match="cannot read"):
        list(read_lines(tmp_path))


def test_two_kinds_of_one_name_are_two_kinds():
    whole = dataclasses.make_dataclass("Summary", [("rows", int)])
    named = dataclasses.make_dataclass("Summary", [("title", str)])
    assert (from_dict(whole, {"rows": 3}), from_dict(named, {"title": "x"})) == (whole(3), named("x"))
    assert (to_dict(whole(3)), to_dict(named("x"))) == ({"rows": 3}, {"title": "x"})
    with pytest.raises(DataError, match="a summary has a bad field 'title'"):
        from_dict(named, {"rows": 3})


ENDS = "\u2028\u2029\u0085"  # str.splitlines takes each of them for the end of a line


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(f'\ufeff{{"a": "b{ENDS}c"}}\r\n\n[1]\n2'.encode())
    assert list(read_lines(path)) == [(1, {"a": f"b{ENDS}c"}), (3, [1]), (4, 2)]
    assert list(read_lines(path, torn=True)) == [(1, {"a": f"b{ENDS}c"}), (3, [1])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', r"x.jsonl, line 2: not JSON \(Expecting value"),
        (b"\xff", "line 2 is not UTF-8"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b"9" * 5000, "line 2: not JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        list(read_lines(tmp_path / "x.jsonl", "Mend it."))
    assert caught.value.hint == "Mend it."


def test_a_ledger_takes_any_character_in_a_reason(tmp_path):
    book = Ledger(Store(tmp_path), "farms")
    book.add("night", decision="kept", reason=f"no such file: x{ENDS}y.sqlite", new=["0001-a"])
    book.add("night", decision="nothing", reason="", new=[])
    assert [row["reason"] for row in book.lines()] == [f"no such file: x{ENDS}y.sqlite", ""]
    assert decisions(ledgers(Store(tmp_path))["farms"].lines()) == {"0001-a": "kept"}


def test_whether_an_answer_abstains_is_told_in_one_pass_over_it():
    assert is_abstention(" select  'unanswerable' AS answer ; ")
    for end in (" " * 500_000, " AS a" + ";" * 500_000 + " "):
        assert not is_abstention(f"SELECT 'unanswerable'{end}x")
