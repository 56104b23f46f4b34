"""How results, events and progress look: as JSON, in a pipe, on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn, Self, TextIO

from outlast import (
    Cancelled,
    Chunk,
    Completed,
    Data,
    Event,
    Failed,
    Gap,
    Job,
    JobInfo,
    Progress,
    ReplyShapeError,
    Restarted,
)

__all__ = [
    "Ended",
    "Meter",
    "as_text",
    "dump",
    "event_json",
    "job_json",
    "note",
    "on_terminal",
    "pairs",
    "put",
    "stream",
    "table",
]


def dump(value: Any) -> None:
    """One JSON value on one line of stdout."""
    put(json.dumps(value, ensure_ascii=False))


def put(text: str, end: str = "\n") -> None:
    _print(text, end, sys.stdout)


def _print(text: str, end: str, to: TextIO) -> None:
    print(text.translate(_CONTROLS) if to.isatty() else text, end=end, file=to, flush=True)


_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""What a terminal would obey instead of show. A model's text or an error's may hold anything."""


def note(text: str) -> None:
    """A remark for people, on stderr."""
    _print(text, "\n", sys.stderr)


def as_text(value: Any) -> str:
    """A result as people read it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns, the same on a terminal and in a pipe."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    for line in lines:
        put("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def pairs(values: dict[str, Any]) -> None:
    """One line for each value that is set."""
    rows = [(name, as_text(value)) for name, value in values.items() if value is not None]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        put(f"{name.ljust(width)}  {text}")


# -- jobs and events ---------------------------------------------------------------------------------------------------


def when(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def info_json(job: JobInfo, queue: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "queue": queue,
        "status": job.status,
        "attempt": job.attempt,
        "starts": job.starts,
        "max_attempts": job.max_attempts,
        "progress": job.progress,
        "priority": job.priority,
        "created_at": when(job.created_at),
        "updated_at": when(job.updated_at),
        "started_at": when(job.started_at),
        "finished_at": when(job.finished_at),
        "cancel_requested": job.cancel_requested,
        "idempotency_key": job.idempotency_key,
        "owner": job.owner,
        "usage": job.usage or None,
        "error": job.error,
    }


def job_json(job: Job[Any, Any], queue: str) -> dict[str, Any]:
    value = info_json(job, queue)
    try:
        value["payload"] = job.payload
        if job.status == "completed":
            value["result"] = job.result
    except ReplyShapeError as error:
        value["unreadable"] = str(error)  # a foreign or damaged record is shown as far as it goes
    return value


def event_json(event: Event[Any]) -> dict[str, Any]:
    value: dict[str, Any] = {"id": event.id, "type": event.type, "attempt": event.attempt}
    match event:
        case Chunk():
            value["data"] = event.data
        case Data() | Progress():
            value["value"] = event.value
        case Gap():
            value["first_available"] = event.first_available
        case Completed():
            value["result"] = event.result
        case Failed():
            value["error"] = event.error
        case Restarted() | Cancelled():
            pass
    return value


Ended = Completed[Any] | Failed | Cancelled


def on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Meter:
    """A spinner with a bar on stderr, on terminals only. It goes away before anything else is printed."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._bar: Any = None
        self._task: Any = None

    def show(self) -> None:
        if self._bar is not None or not on_terminal():
            return
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._text, total=None)
        self._bar.start()

    def update(self, value: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=1.0, completed=value)

    def restart(self, attempt: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=None, completed=0, description=f"{self._text}, attempt {attempt}")

    def __enter__(self) -> Self:
        self.show()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hide()

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def stream(events: Iterable[Event[Any]], queue: str, job: str, *, text: bool, progress: float = 0.0) -> Ended | None:
    """Print a job's output as it comes (`text`), or only show that it goes on. The end, or None if there was none."""
    last: list[str] = []
    try:
        return _stream(events, job, last, text=text, progress=progress)
    except KeyboardInterrupt:
        after = f" --after {last[0]}" if last and text else ""
        note(
            f"\nthe job goes on; `outlast watch {queue} {job}{after}` resumes, `outlast cancel {queue} {job}` stops it"
        )
        raise


def _stream(events: Iterable[Event[Any]], job: str, last: list[str], *, text: bool, progress: float) -> Ended | None:
    written = ""
    with Meter(f"job {job}") as meter:
        if progress > 0:
            meter.update(progress)
        for event in events:
            last[:] = [event.id]
            match event:
                case Chunk() if text:
                    meter.hide()
                    put(event.data, end="")
                    written += event.data
                case Data() if text:
                    meter.hide()
                    dump(event.value)
                case Progress():
                    meter.update(event.value)
                case Restarted() | Gap():
                    meter.restart(event.attempt)
                    if written:
                        _line(written)
                        note(
                            f"-- starting over: attempt {event.attempt} --"
                            if isinstance(event, Restarted)
                            else "-- earlier output is gone; what follows is not the beginning --"
                        )
                        written = ""
                        meter.show()
                case Completed():
                    meter.hide()
                    result = as_text(event.result)
                    if written:
                        _line(written)
                    # What was streamed is not printed twice; a reader that came late gets the whole result.
                    if not written or not result.endswith(written):
                        put(result)
                    return event
                case Failed() | Cancelled():
                    meter.hide()
                    _line(written)
                    return event
                case _:
                    pass
    _line(written)
    return None


def _line(written: str) -> None:
    if written and not written.endswith("\n"):
        put("")


def fail(kind: str, message: str, code: int, *, as_json: bool) -> NoReturn:
    """Say what is wrong on stderr and exit."""
    import typer

    note(json.dumps({"error": {"type": kind, "message": message}}, ensure_ascii=False) if as_json else message)
    raise typer.Exit(code)
