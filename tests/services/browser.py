"""Headless Chromium over its DevTools protocol: open a page, wait for a text, click a button, take a picture."""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest
from websockets.sync.client import connect

from tests.services.conftest import wait_for


class Page:
    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events = []  # of the domains that a test enables

    def call(self, method, **parameters):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, url):
        self.call("Page.navigate", url=url)

    def wait_for(self, text, seconds=60):
        script = "document.body ? document.body.innerText : ''"
        wait_for(lambda: text in (self.evaluate(script) or ""), seconds, f"the page shows {text!r}")

    def click(self, text, seconds=60):
        """The control with exactly that text, as soon as it is there and enabled."""
        script = (
            "(() => { const found = [...document.body.querySelectorAll('*')]"
            f".filter(e => (e.innerText || '').trim() === {json.dumps(text)}).pop();"
            "const control = found && (found.closest('button, a') || found);"
            "if (!control || control.disabled) return false; control.click(); return true; })()"
        )
        wait_for(lambda: self.evaluate(script), seconds, f"something to click says {text!r}")

    def picture(self, path, rest=2.0):
        time.sleep(rest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder, width=1400, height=1000):
    program = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no Chromium")
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--window-size={width},{height}", f"--user-data-dir={folder}", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        place = folder / "DevToolsActivePort"
        port, *_ = wait_for(lambda: place.exists() and place.read_text().split(), 60, "Chromium starts")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            tab = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)
