"""What Vercel has around a function's process: the sockets and variables that its own bootstrap is started with."""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import httpx


class Host:
    """One instance of the function whose entry point is `entry`, a file in `folder`; its `client` reaches it by HTTP.

    `variable`: the name that the file exports (`app` or `handler`), as Vercel's builder finds it.
    """

    def __init__(
        self, python: Path, folder: Path, entry: str, variable: str, environment: Mapping[str, str], *, patience: float
    ) -> None:
        self._python = python
        self._folder = folder
        self._patience = patience
        self._environment = {
            "PATH": os.defpath,
            "__VC_HANDLER_ENTRYPOINT": entry,
            "__VC_HANDLER_ENTRYPOINT_ABS": str(folder / entry),
            "__VC_HANDLER_MODULE_NAME": entry.removesuffix(".py").replace("/", "."),
            "__VC_HANDLER_VARIABLE_NAME": variable,
            **environment,
        }
        self.logs: list[str] = []
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Self:
        self._socket_folder = tempfile.TemporaryDirectory(prefix="vc")  # a socket's path may have 107 bytes at most
        where = f"{self._socket_folder.name}/ipc.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(where)
        self._listener.listen(1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._process = subprocess.Popen(
            [self._python, "-c", "import vercel_runtime.vc_init"],
            cwd=self._folder,
            env={**self._environment, "VERCEL_IPC_PATH": where},
        )
        try:
            while (message := self.messages.get(timeout=self._patience))["type"] != "server-started":
                assert message["type"] != "unrecoverable-error", message["payload"]["message"]
        except BaseException:
            self.__exit__()
            raise
        port = message["payload"]["httpPort"]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=self._patience)
        return self

    def __exit__(self, *exc: object) -> None:
        if hasattr(self, "client"):
            self.client.close()
        self._process.kill()
        self._process.wait()
        self._listener.close()
        self._socket_folder.cleanup()

    def _read(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rb") as stream:
            for message in _messages(stream):
                if message["type"] == "log":
                    self.logs.append(base64.b64decode(message["payload"]["message"]).decode())
                self.messages.put(message)


def _messages(stream: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    while part := stream.read1():
        *whole, rest = (rest + part).split(b"\0")
        yield from map(json.loads, whole)


def invocation(number: int = 1, *, deadline: float | None = None) -> dict[str, str]:
    """The headers that Vercel's proxy adds to a request. `deadline`: seconds until the function is killed."""
    headers = {"x-vercel-internal-invocation-id": f"invocation-{number}", "x-vercel-internal-request-id": str(number)}
    if deadline is not None:
        at = datetime.now(UTC) + timedelta(seconds=deadline)
        headers["x-vercel-internal-deadline"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return headers
