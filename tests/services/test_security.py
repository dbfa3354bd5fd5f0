"""Who may start runs on a worker: who has the server's key, no page of another site; and what a form may not set."""

import json
import urllib.error
import urllib.request

import pytest
import yaml

from tests.fakes import http_server
from tests.services.browser import browser
from tests.services.conftest import ROOT, SMALL_DATA

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


def answer(site, path, body=None, **headers):
    """Status and headers of a request without the server's key, unless a header carries it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{site.port}/api/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


def attack(site):
    launch = json.dumps(["bash", "-c", f"touch {site.folder / 'attacked'}"])
    return {"parameters": {"recipe": "miniature", "overrides": [*SMALL_DATA, f"hardware.launch={launch}"]}}


def deployment_id(site, name):
    return str(next(found["id"] for found in site.api("deployments/filter", {}) if found["name"] == name))


@pytest.mark.parametrize("path", ["deployments/filter", "flow_runs/filter", "work_pools/filter"])
def test_without_the_key_the_server_tells_and_does_nothing(site, path):
    assert answer(site, path, {})[0] == 401
    create = f"deployments/{deployment_id(site, 'miniature')}/create_flow_run"
    assert answer(site, create, attack(site))[0] == 401
    assert answer(site, create, attack(site), Authorization="Basic c3FsdHJhaW46Z3Vlc3M=")[0] == 401


def test_browsers_are_told_to_let_no_other_page_read_the_server(site):
    for origin, allowed in (("http://evil.example", None), (f"http://127.0.0.1:{site.port}", True)):
        status, headers = answer(site, "health", Origin=origin)
        assert status == 200
        named = {name.lower(): value for name, value in headers.items()}.get("access-control-allow-origin")
        assert named == (origin if allowed else None)


def test_a_page_of_another_site_starts_no_run(site, tmp_path):
    before = site.newest_run().get("id")
    url = f"http://127.0.0.1:{site.port}/api/deployments/{deployment_id(site, 'miniature')}/create_flow_run"
    body = json.dumps(attack(site))
    tries = [
        f"fetch({url!r}, {{method: 'POST', headers: {{'Content-Type': 'application/json'}}, body}})",
        f"fetch({url!r}, {{method: 'POST', mode: 'no-cors', body: new Blob([body])}})",
    ]
    asked = ", ".join(f"{attempt}.then(r => r.type + r.status, e => 'refused')" for attempt in tries)
    script = f"const body = {json.dumps(body)}; Promise.all([{asked}]).then(all => document.body.innerText = all)"
    html = f"<body>asking<script>{script}</script></body>".encode()
    other_site = http_server((200, {"Content-Type": "text/html"}, html))
    with other_site as server, browser(tmp_path / "profile") as page:
        page.open(f"{server.url}/")
        page.wait_for("refused,opaque0")
    assert site.newest_run().get("id") == before
    assert not (site.folder / "attacked").exists()


def test_a_form_that_names_a_program_fails_with_one_plain_line(site):
    overrides = attack(site)["parameters"]["overrides"]
    done = site.deployment_run("retrain/miniature", overrides, "--watch")
    assert done.returncode == 1
    message = site.newest_run()["state"]["message"]
    assert "a form may not set hardware.launch" in message
    assert "SQLTRAIN_FORM_KEYS" in message
    assert "\n" not in message
    assert not (site.folder / "attacked").exists()


def test_text_that_is_no_override_is_refused_before_there_is_a_run(site):
    before = site.newest_run().get("id")
    done = site.deployment_run("curate/cpu", ["not an override"], "--watch")
    assert done.returncode == 1
    assert "overrides" in done.stdout + done.stderr
    assert site.newest_run().get("id") == before


@pytest.mark.slow
def test_ci_s_night_ends_red_when_the_night_failed_and_without_the_key(site):
    """The very script of the workflow; the night has no inbox here."""
    workflow = yaml.safe_load((ROOT / "infra" / "github" / "retrain.yml").read_text(encoding="utf-8"))
    script = next(step["run"] for step in workflow["jobs"]["night"]["steps"] if step.get("name") == "night")
    done = site.run(script)
    assert done.returncode == 1
    assert "retrain/nightly ended as Failed: " in done.stderr
    assert "inbox" in site.newest_run("retrain")["state"]["message"]
    refused = site.run(f"export PREFECT_API_AUTH_STRING=sqltrain:guess; {script}")
    assert refused.returncode == 2
    assert "refuses the key" in refused.stderr
    unknown = site.run("sqltrain nightly miniature --deployment retrain/nowhere")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("error: the server has no deployment 'retrain/nowhere'")
    wrong = site.run("sqltrain nightly miniature --deployment retrain/nightly 'not an override'")
    assert wrong.returncode == 2
    assert "the server refuses retrain/nightly" in wrong.stderr
