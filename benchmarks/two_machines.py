"""Two machines and one bucket: what each pulls, makes and pushes over three nights, a rollback and a damaged manifest.

    python benchmarks/two_machines.py [--folder DIR]

Each machine is a store of its own; the bucket is a server that speaks S3 (moto, of the extra `services`). The nights
are SFT alone on little databases, seconds each. Printed for each command: the machine, its seconds, its exit code, and
its last line.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from pipelines.core.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.nightly import farms  # noqa: E402

BUCKET = "s3://sqltrain/store"


class Machine:
    """A store, and commands on it."""

    def __init__(self, name: str, store: Path, words: list[str]) -> None:
        self.name, self.store, self.words = name, store, words

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A command that runs."""
        line = [sys.executable, "-m", "flows.cli", *command, "--store", str(self.store)]
        return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, shown: str, *command: str) -> str:
        """A command to its end: a row of the table; what it printed."""
        begun = time.monotonic()
        return self.end(shown, self.start(*command), begun)

    def end(self, shown: str, process: subprocess.Popen[str], begun: float) -> str:
        """Wait for a command, and print its row."""
        said = process.communicate()[0]
        last = " ".join(said.strip().splitlines()[-1:])
        row = f"| {self.name} | {shown} | {time.monotonic() - begun:.0f} | {process.returncode} | {last[:110]} |"
        print(row, flush=True)
        return said

    def night(self, shown: str) -> str:
        """A night; what the ledger says of it."""
        self.run(f"nightly: {shown}", "nightly", "miniature", *self.words)
        return self.last()

    def last(self) -> str:
        """The decision of the newest night."""
        lines = (self.store / "nightly" / "miniature" / "ledger.jsonl").read_text().splitlines()
        return str(json.loads(lines[-1]).get("decision"))


def count(said: str, word: str) -> int:
    """How many stages a push or a pull moved, by its last line."""
    found = re.search(rf"(\d+) stages? {word}", said)
    assert found is not None, said
    return int(found[1])


def main() -> None:
    """Run the story and print the table; an assertion stands where the result is not what operators expect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where all is made; a temporary folder by default")
    asked = parser.parse_args()
    port = free_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(dir=asked.folder) as place, (Path(place) / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
        try:
            for _ in range(200):
                try:
                    request = urllib.request.Request(f"http://127.0.0.1:{port}/sqltrain", method="PUT")
                    urllib.request.urlopen(request, timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.3)
            story(Path(place))
        finally:
            server.terminate()
            server.wait()


def story(folder: Path) -> None:
    """Nights of two machines."""
    base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
    words = farms.overrides(folder, folder / "base" / base)
    inbox = folder / "inbox"
    inbox.mkdir()
    one, two = (Machine(name, folder / name, words) for name in ("one", "two"))
    print("| machine | command | s | exit | last line |\n|---|---|---|---|---|")
    assert one.night("its own two families") == "promoted"
    assert count(one.run("store push", "store", "push", BUCKET), "pushed") > 0
    assert count(one.run("store push again", "store", "push", BUCKET), "pushed") == 0
    assert count(two.run("store pull", "store", "pull", BUCKET), "pulled") > 0
    farms.questions(inbox, "monday.jsonl", farms.named("m", 20), [2, 3])
    two.night("two more families")
    assert count(two.run("store push", "store", "push", BUCKET), "pushed") > 0
    assert count(one.run("store pull", "store", "pull", BUCKET), "pulled") > 0
    assert count(one.run("store push", "store", "push", BUCKET), "pushed") == 0
    assert count(two.run("store pull", "store", "pull", BUCKET), "pulled") == 0
    for machine in (one, two):
        said = machine.run("store verify", "store", "verify")
        assert "0 damaged" in said or "damaged" not in said, said
    farms.questions(inbox, "tuesday.jsonl", farms.named("u", 20), [4, 5])
    begun, process = time.monotonic(), one.start("nightly", "miniature", *words)
    while not any(path.stat().st_size for path in (one.store / "sft").glob(".work-*/timing.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    one.run("champion rollback, while it trains", "champion", "rollback", "miniature")
    one.end("nightly: the last two, rolled back in mid-SFT", process, begun)
    print(
        f"\nThe night's decision: {one.last()}\n\n| machine | command | s | exit | last line |\n|---|---|---|---|---|"
    )
    for manifest in one.store.glob("filter/*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:40])
    said = one.run("store gc --days 0, manifests cut short", "store", "gc", "--days", "0")
    assert "no finished stage goes" in said, said
    print(f"\n{said.splitlines()[0]}")


if __name__ == "__main__":
    main()
