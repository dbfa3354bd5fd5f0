"""BIRD mini-dev's third dialect on a real MariaDB server: read, asked and evaluated."""

import dataclasses
import json
from pathlib import Path

import pytest
from copies import to_mysql
from shops import build_shop

from pipelines.environment.core import Environment

pytestmark = pytest.mark.services


def test_mini_dev_in_mysql_is_read_asked_and_evaluated(
    mysql_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataclasses.replace(build_shop(tmp_path / "shop.sqlite"), id="bird")
    to_mysql(source, mysql_port, "teller")
    monkeypatch.setenv("MYSQL_PWD", "secret")
    golds = ["SELECT `name` FROM `customer` ORDER BY `name` LIMIT 1", "SELECT `nothing` FROM `customer`"]
    rows = [{"db_id": "shop", "question": "Who comes first?", "evidence": "", "SQL": gold} for gold in golds]
    (tmp_path / "mini_dev_mysql.json").write_text(json.dumps(rows), encoding="utf-8")
    words = [
        "include=data/bird_mini_dev_mysql",
        f"data.test.0.path={tmp_path}",
        f"data.test.0.options.address=mysql://teller@127.0.0.1:{mysql_port}/bird",
    ]
    with Environment("skyrl_sql", words) as environment:
        rewards = []
        for question in environment.questions("bird_mini_dev_mysql"):
            session = environment.reset(question)
            assert "customer" in session.messages[-1]["content"]
            looked = session.step("<think>a</think>\n<sql>SELECT `name` FROM `customer` WHERE `name` = 'Ada'</sql>")
            assert looked.observation is not None
            assert "Ada" in looked.observation
            rewards.append(session.step(f"<think>a</think>\n<solution>{golds[0]}</solution>").reward)
    assert rewards == [1.0, None]  # the second gold SQL fails
