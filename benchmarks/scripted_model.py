"""A model server that speaks OpenAI's chat protocol and says what a script says, for benchmarks of what is before it.

    python benchmarks/scripted_model.py PORT

A question "chat 3 question 14" is answered in two turns: a query that counts, and SQL whose row holds 3, 14 and the
square of 3, so that whoever asked sees at once whether the answer is theirs.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASKED = re.compile(r"chat (\d+) question (\d+)")
LOOK = "<reasoning>I look.</reasoning>\n<sql>SELECT count(*) FROM number</sql>"
SQL = "SELECT {0} AS chat, {1} AS question, value FROM number WHERE id = {0}"
ANSWER = f"<reasoning>I know.</reasoning>\n<solution>{SQL}</solution>"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def say(self, messages: list[dict[str, Any]]) -> str:
        """The next turn of a conversation."""
        if all(message["role"] != "assistant" for message in messages):
            return LOOK
        asked = next(filter(None, (ASKED.search(message["content"]) for message in messages)))
        return ANSWER.format(*asked.groups())

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": self.say(body["messages"])}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "x", "object": "chat.completion", "model": "script", "choices": [choice], "usage": usage}
        text = json.dumps(whole)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
