"""A worker may have been taken over by what it ran: whatever it answers, this process goes on."""

import pickle
from typing import Any

import pytest

from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.sandbox import pool
from pipelines.sql.sandbox.pool import MalformedReply, check

EXECUTE = ("execute", ("db",), "SELECT 1", 10)
VERDICT_JOB = ("verdict", ("db",), "SELECT 1", "SELECT 1", ("strict",), (False, False), None)
GOOD = ("ok", ("a",), [(1,), (2,)], False, None, None, 0.5, 3)
FACTS = ("ok", None, 1, 0.1)
LIES: list[Any] = [
    7,
    (),
    "ok",
    GOOD[:7],
    (*GOOD, 1),
    ("fine", *GOOD[1:]),
    (["ok"], *GOOD[1:]),
    (GOOD[0], None, *GOOD[2:]),
    (GOOD[0], (1,), *GOOD[2:]),
    (GOOD[0], ("a", "b"), *GOOD[2:]),
    (*GOOD[:2], [1], *GOOD[3:]),
    (*GOOD[:2], [[1], [2]], *GOOD[3:]),
    (*GOOD[:2], {"a": 1}, *GOOD[3:]),
    (*GOOD[:4], b"x", *GOOD[5:]),
    (*GOOD[:6], float("nan"), 3),
    (*GOOD[:6], 0.5, "3"),
    ("error", *GOOD[1:]),
]


@pytest.mark.parametrize("reply", LIES)
def test_a_malformed_result_is_rejected(reply: Any) -> None:
    check(EXECUTE, GOOD)
    with pytest.raises((MalformedReply, TypeError)):
        check(EXECUTE, reply)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        ({}, FACTS),
        ({"bird": 1.0}, FACTS, FACTS),
        ({"strict": "1"}, FACTS, FACTS),
        ({"strict": float("nan")}, FACTS, FACTS),
        ({"strict": 1.0}, FACTS, ("ok", None, -1, 0.1)),
        ({"strict": 1.0}, ("odd", None, 1, 0.1), FACTS),
        ({"strict": 1.0}, None, FACTS),
    ],
)
def test_a_malformed_verdict_is_rejected(reply: Any) -> None:
    check(VERDICT_JOB, ({"strict": 1.0}, FACTS, FACTS))
    with pytest.raises((MalformedReply, TypeError)):
        check(VERDICT_JOB, reply)


@pytest.mark.parametrize("lie", [7, ("ok",), (*GOOD[:2], [1], *GOOD[3:]), None])
def test_a_nonsense_answer_means_a_dead_worker(shop: Database, monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    """Every reply is replaced on its way in: nothing raises, nothing hangs, nothing is scored."""
    monkeypatch.setattr(pool, "unpack_replies", lambda body: iter([pickle.loads(pickle.dumps(lie))]))
    with SqlEngine(Limits(timeout_s=5)) as engine:
        (result,) = engine.execute_many([(shop, "SELECT 1")])
        assert not result.ok
        assert result.error_class == "worker_died"
        (verdict,) = engine.verdicts([Pair(shop, "SELECT 1", "SELECT 1")], ["strict"])
        assert verdict.scores == {"strict": 0.0}
    monkeypatch.undo()
    with SqlEngine(Limits(timeout_s=5)) as engine:
        assert engine.execute_many([(shop, "SELECT 1")])[0].status is ExecutionStatus.OK
