"""Records round-trip through JSONL and Parquet, and a bad line is named."""

import dataclasses
from pathlib import Path

import pytest

from pipelines.core import frames
from pipelines.core.errors import DataError
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
    read_jsonl,
    to_dict,
    write_jsonl,
)

EXAMPLE = Example(
    "q1", "how many ?", Database("farm", "sqlite", "farm.sqlite"), "SELECT 1", meta={"family": "é", "n": 2}
)
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
def test_records_are_read_back_equal_from_jsonl_and_parquet(tmp_path: Path, record: Example | Trajectory) -> None:
    kind = type(record)
    write_jsonl(tmp_path / "r.jsonl", [record, record])
    assert list(read_jsonl(tmp_path / "r.jsonl", kind)) == [record, record]
    frames.write(tmp_path / "r.parquet", frames.to_frame([record], extra=[{"pool": "sft"}]))
    frame = frames.read(tmp_path / "r.parquet")
    assert frame["pool"].to_list() == ["sft"]
    assert frames.from_frame(frame, kind) == [record]


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        frames.write(tmp_path / name, frames.to_frame([TRAJECTORY] * 50))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_facts_of_a_trajectory() -> None:
    assert TRAJECTORY.n_agent_tokens == 2
    assert not TRAJECTORY.well_formed  # its first turn is malformed


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": 1\n')
    with pytest.raises(DataError, match=r"r.jsonl, line 1: not JSON"):
        list(read_jsonl(path, Example))
    path.write_text('{"id": "q"}\n')
    with pytest.raises(DataError, match=r"bad field 'question'"):
        list(read_jsonl(path, Example))
    with pytest.raises(DataError, match="no such file"):
        list(read_jsonl(tmp_path / "none.jsonl", Example))


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("rows")
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file"):
        frames.read(tmp_path / "x.parquet")


def test_two_kinds_of_one_name_are_two_kinds() -> None:
    whole = dataclasses.make_dataclass("Summary", [("rows", int)])
    named = dataclasses.make_dataclass("Summary", [("title", str)])
    assert (from_dict(whole, {"rows": 3}), from_dict(named, {"title": "x"})) == (whole(3), named("x"))
    assert (to_dict(whole(3)), to_dict(named("x"))) == ({"rows": 3}, {"title": "x"})
    with pytest.raises(DataError, match="a summary has a bad field 'title'"):
        from_dict(named, {"rows": 3})
