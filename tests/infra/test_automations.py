"""A mistake in the command that makes automations is one plain line."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("prefect", reason="the ops extra is not installed")
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tests.fakes import load_script

PROGRAM = Path(__file__).resolve().parents[2] / "infra" / "automations.py"
NOBODY = "http://127.0.0.1:9/api"  # the port of "discard", which nothing listens at


@pytest.mark.parametrize(
    ("words", "server", "message"),
    [
        (["--notify", "http://x/y"], NOBODY, f"error: no Prefect server answers at {NOBODY}"),
        (["--notify", "http://x/y"], None, "PREFECT_API_URL is not set"),
        (["--notify", "x/y"], NOBODY, "'x/y' is not an address"),
        (["--reload", "http://x/y", "--stuck", "0.1"], NOBODY, "--stuck 0.1 is too short"),
        (["--notify", "http://x/y", "--stuck", "nan"], NOBODY, "--stuck nan is not a number of minutes"),
        (["--notify", "http://x/y", "--stuck", "inf"], NOBODY, "--stuck inf is not a number of minutes"),
        ([], NOBODY, "pass --notify, --reload, or both"),
    ],
)
def test_a_mistake_is_one_plain_line(words, server, message, monkeypatch, capsys):
    program = load_script(PROGRAM)
    monkeypatch.setattr(sys, "argv", ["automations.py", *words])
    with temporary_settings({PREFECT_API_URL: server, PREFECT_CLIENT_MAX_RETRIES: 0}), pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code
    assert message in f"{end.value} {capsys.readouterr().err}"
