"""Child processes that are kept running: restarted when they die or their source changes, stopped together.

Each child is in a process group of its own, so that Ctrl-C in a terminal reaches only the parent, which passes it on
in order. Parent and child hold the two ends of a socket: over it the child says that it is ready, and its end tells
the child that the parent is gone, however it went.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .show import note

__all__ = ["FINAL", "Lifeline", "Program", "Supervisor", "on_signals"]

FINAL = frozenset({2, 3})
"""Exit codes of a child that another start would only repeat: wrong arguments or module, login refused."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
HEALTHY = 10.0
"""Seconds after which a child counts as well started, so that its next death is a new trouble and not the same one."""
LOOK = 0.5
"""Seconds between two looks at the source files."""


class Lifeline:
    """The child's end of the socket. When the parent dies, this process gets SIGTERM: it finishes and ends."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        threading.Thread(target=self._wait, name="outlast-lifeline", daemon=True).start()

    def ready(self) -> None:
        with suppress(OSError):
            self._socket.send(b"r")

    def _wait(self) -> None:
        with suppress(OSError):
            while self._socket.recv(16):
                pass
        os.kill(os.getpid(), signal.SIGTERM)


class Program:
    """What to run. ``{fd}`` in `command` stands for the child's end of the socket."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.command = command
        self.env = env
        self.fds = fds
        self.ready = asyncio.Event()
        self.started = False
        """Whether it was ever ready."""
        self.changed = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def run_once(self, stdout: int | None, stopping: asyncio.Event) -> int:
        """One life of the process: from its start to its exit code."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self.process = await asyncio.create_subprocess_exec(
                    *[part.replace("{fd}", str(theirs.fileno())) for part in self.command],
                    env=self.env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    pass_fds=[theirs.fileno(), *self.fds],
                    process_group=0,
                )
            if stopping.is_set() or self.changed.is_set():  # while it was being started, and could not be told
                self.signal(signal.SIGTERM)
            listening = asyncio.ensure_future(self._listen(ours))
            try:
                return await self.process.wait()
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
                self.ready.clear()

    async def _listen(self, ours: socket.socket) -> None:
        if await asyncio.get_running_loop().sock_recv(ours, 1):
            self.ready.set()
            self.started = True


class Supervisor:
    """Runs programs until `stop`, or until all are done.

    - A program that ends is started again, at once at first and then after pauses of up to 30 s. With `until_done`
      one that ends with 0 has done its work. Exit codes in FINAL end the whole: another start would not mend them.
    - `reload`: a folder whose Python files are watched; a change restarts all programs. Once a program has started
      well, a FINAL exit code does not end the whole: a change may mend it.
    - `kill_after`: seconds from the first stop to SIGKILL; None lets the programs finish what they do.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        until_done: bool = False,
        reload: Path | None = None,
        kill_after: float | None = None,
        stdout: int | None = None,
    ) -> None:
        self._programs = programs
        self._until_done = until_done
        self._reload = reload
        self._kill_after = kill_after
        self._stdout = stdout
        self._stops = 0
        self._stopping = asyncio.Event()
        self._code = 0

    def stop(self) -> None:
        """First: SIGTERM, by which workers finish their jobs. Second: SIGTERM again, by which they hand them back.
        Third: SIGKILL."""
        self._stops += 1
        self._stopping.set()
        for program in self._programs:
            program.signal(signal.SIGTERM if self._stops < 3 else signal.SIGKILL)
        if self._stops == 1 and self._kill_after is not None:
            asyncio.get_running_loop().call_later(self._kill_after, self._kill)

    def _kill(self) -> None:
        for program in self._programs:
            program.signal(signal.SIGKILL)

    async def run(self) -> int:
        """Run everything. The exit code: 0, or the first that was not."""
        watching = asyncio.ensure_future(self._watch_source()) if self._reload is not None else None
        try:
            await asyncio.gather(*(self._keep(program) for program in self._programs))
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        return self._code

    async def _keep(self, program: Program) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            program.changed.clear()
            started = time.monotonic()
            code = await program.run_once(self._stdout, self._stopping)
            if self._stopping.is_set() or (code == 0 and self._until_done):
                if code != -signal.SIGTERM:  # ours, and it came before the program could have begun anything
                    self._code = self._code or (code if code >= 0 else 128 - code)
                return
            if program.changed.is_set():
                continue
            if code in FINAL:
                if self._reload is None or not program.started:
                    self._code = code
                    self.stop()
                    return
                note(f"{program.name} waits for a change of its source")
                await self._first(self._stopping, program.changed)
                continue
            pause = FIRST_PAUSE if time.monotonic() - started > HEALTHY else pause
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            note(f"{program.name} {how}; it starts again in {pause:g} s")
            await self._first(self._stopping, program.changed, timeout=pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _first(self, *events: asyncio.Event, timeout: float | None = None) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    async def _watch_source(self) -> None:
        assert self._reload is not None
        before = await asyncio.to_thread(snapshot, self._reload)
        took = 0.0
        while True:
            # In a very large folder one look takes long: it must not keep a processor busy.
            await asyncio.sleep(max(LOOK, 10 * took))
            started = time.monotonic()
            now = await asyncio.to_thread(snapshot, self._reload)
            took = time.monotonic() - started
            if now != before:
                changed = min(set(now.items()) ^ set(before.items()))[0]
                note(f"{changed} has changed: restarting")
                before = now
                for program in self._programs:
                    program.changed.set()
                    program.signal(signal.SIGTERM)


def snapshot(folder: Path) -> dict[str, int]:
    """The modification time of each Python file below `folder`, leaving out what nobody edits there."""
    return dict(_sources(str(folder)))


def _sources(folder: str) -> Iterator[tuple[str, int]]:
    with suppress(OSError), os.scandir(folder) as entries:
        found = list(entries)
        if any(entry.name == "pyvenv.cfg" for entry in found):
            return
        for entry in found:
            with suppress(OSError):
                if entry.name.endswith(".py"):
                    yield entry.path, entry.stat().st_mtime_ns
                elif (
                    entry.is_dir(follow_symlinks=False)
                    and not entry.name.startswith(".")
                    and entry.name not in ("__pycache__", "node_modules")
                ):
                    yield from _sources(entry.path)


@contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` in the running loop for each SIGINT, SIGTERM and SIGHUP (unless nohup has switched that off)."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
