"""A stand-in for `vllm serve`: a process that takes its command line and speaks the part of its protocol that we use.

Its command line is as a Python's: `-m vllm.entrypoints.openai.api_server --model FOLDER --port PORT ...`. It has a
child, as vLLM has its engine. In the folder `STAND_IN_HOME`, `started.jsonl` gets each command line with the process
ids, `asked.jsonl` each POST, and a file `broken` makes it fail at the start.
"""

import itertools
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = " ".join(sys.argv[3:]).replace("=", " ").split(" ")
OPTIONS = {word: following for word, following in itertools.pairwise([*WORDS, ""]) if word.startswith("--")}
HOME = Path(os.environ["STAND_IN_HOME"])


class Handler(BaseHTTPRequestHandler):
    """`/health`, `/v1/models`, and every POST is remembered."""

    def do_GET(self):
        """Well, and serving one model."""
        self._reply({"object": "list", "data": [{"id": OPTIONS["--served-model-name"], "object": "model"}]})

    def do_POST(self):
        """What is asked for goes to `asked.jsonl`."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        with (HOME / "asked.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([OPTIONS["--port"], self.path, body]) + "\n")
        self._reply({})

    def _reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Say nothing."""


def main():
    """Serve until killed."""
    facts = {"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), **OPTIONS}
    if (HOME / "broken").exists():
        sys.exit("ValueError: no room for the keys and values")
    engine = subprocess.Popen(["sleep", "600"])
    facts["engine"] = engine.pid
    with (HOME / "started.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
    with ThreadingHTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
