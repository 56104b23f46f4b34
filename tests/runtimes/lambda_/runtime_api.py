"""A Lambda runtime API on loopback, and the sandbox of one function: what AWS has around a function's process.

The process asks for its next invocation and posts its answer, whole or (a streaming runtime) in parts. Between two
invocations AWS freezes a sandbox; here that is SIGSTOP.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

PREFIX = "/2018-06-01/runtime/"
PATIENCE = 30.0


@dataclass
class Invocation:
    """One event, and its answer as far as it has arrived."""

    id: str
    event: Any
    deadline: float
    mode: str = "buffered"
    content_type: str = ""
    failed: bool = False
    trailers: list[str] = field(default_factory=list)
    _parts: queue.Queue[bytes | None] = field(default_factory=queue.Queue)

    def part(self) -> bytes | None:
        """The next part of the answer; None after the last."""
        return self._parts.get(timeout=PATIENCE)

    def rest(self) -> bytes:
        """What is left of the answer."""
        return b"".join(iter(self.part, None))

    def json(self) -> Any:
        """The whole answer. Raises when the function raised."""
        answer = json.loads(self.rest())
        assert not self.failed, answer
        return answer


class _Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == f"{PREFIX}invocation/next", self.path
        invocation = self.server.waiting.get()
        if invocation is None:
            self.close_connection = True
            return
        body = json.dumps(invocation.event).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("lambda-runtime-aws-request-id", invocation.id)
        self.send_header("lambda-runtime-trace-id", "Root=1-00000000-000000000000000000000000")
        self.send_header("lambda-runtime-deadline-ms", str(int((time.time() + invocation.deadline) * 1000)))
        self.send_header("lambda-runtime-invoked-function-arn", "arn:aws:lambda:eu-central-1:0:function:f")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        where = self.path.removeprefix(PREFIX).split("/")
        if where[0] != "invocation":
            self.server.broken.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self._accepted()
            return
        invocation = self.server.running[where[1]]
        invocation.failed = where[2] == "error"
        invocation.mode = self.headers.get("lambda-runtime-function-response-mode", "buffered")
        invocation.content_type = self.headers.get("content-type", "")
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                invocation._parts.put(self.rfile.read(size))
                self.rfile.readline()
            while (line := self.rfile.readline().strip()) != b"":
                invocation.trailers.append(line.decode())
        else:
            invocation._parts.put(self.rfile.read(int(self.headers["content-length"])))
        self._accepted()
        invocation._parts.put(None)

    def _accepted(self) -> None:
        self.send_response(202)
        self.send_header("content-length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        self.waiting: queue.Queue[Invocation | None] = queue.Queue()
        self.running: dict[str, Invocation] = {}
        self.broken: list[str] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the function's process was killed in the middle of its request


class Sandbox:
    """One instance of a function: `command` run in `folder` with nothing but `environment`."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._api = _Server()
        self._thread = threading.Thread(target=self._api.serve_forever, daemon=True)
        self._command = command
        self._folder = folder
        self._environment = {
            "PATH": os.defpath,
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self._api.server_port}",
            "AWS_LAMBDA_FUNCTION_NAME": "f",
            "LAMBDA_TASK_ROOT": str(folder),
            **environment,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        self._log = tempfile.TemporaryFile()  # closed with the sandbox
        self.process = subprocess.Popen(
            self._command, cwd=self._folder, env=self._environment, stdout=self._log, stderr=self._log
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()
        self._api.waiting.put(None)
        self._api.shutdown()
        self._api.server_close()
        self._thread.join()

    def start(self, event: Any, *, deadline: float = 60.0) -> Invocation:
        """Hand out an event that must be answered within `deadline` seconds."""
        invocation = Invocation(f"request-{len(self._api.running)}", event, deadline)
        self._api.running[invocation.id] = invocation
        self._api.waiting.put(invocation)
        return invocation

    def invoke(self, event: Any, *, deadline: float = 60.0) -> Any:
        """The answer to an event, as JSON."""
        invocation = self.start(event, deadline=deadline)
        try:
            return invocation.json()
        except queue.Empty:
            raise AssertionError(f"no answer: {self._api.broken}\n{self.log()}") from None

    def log(self) -> str:
        """What the process has written."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        self._log.seek(0, os.SEEK_END)
        return text

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def url_event(
    method: str, path: str, *, body: Any = None, query: str = "", headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a function URL or an HTTP API (payload format 2.0) sends for a request."""
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": query,
        "headers": {"host": "f.example", "content-type": "application/json", **(headers or {})},
        "body": None if body is None else json.dumps(body),
        "isBase64Encoded": False,
        "requestContext": {
            "http": {"method": method, "path": path, "protocol": "HTTP/1.1", "sourceIp": "203.0.113.7"},
            "domainName": "f.example",
            "stage": "$default",
        },
    }
