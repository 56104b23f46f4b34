"""A job's life as a list of steps, and readers of it that are cut at any place. No server: every place can be tried.

The stream changes as the scripts change it (a restart appends its marker and trims to it); a real `Tail` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outlast import Event, Queue
from outlast.protocol import Keys, Tail

Entry = tuple[str, dict[str, str]]
GEN = 1_764_460_800_000
QUEUE: Queue[Any, Any] = Queue("q")


class Life:
    """Attempts, each a list of texts and of other values, and the result. All but the last attempt are cut short."""

    def __init__(self, attempts: list[list[Any]], result: Any, *, max_len: int = 10_000, markers: bool = True) -> None:
        self.states: list[list[Entry]] = [[]]
        """The stream after each step."""
        self.result = result
        b, n = GEN, 0
        for number, values in enumerate(attempts, 1):
            if number > 1 and markers:
                if n == 0:
                    b += 5_000  # nothing was said: the marker's time is the new start's
                n += 1
                self.states.append([(f"{b}-{n}", {"t": "restarted", "d": str(number), "a": str(number)})])
            for value in values:
                n += 1
                kind, body = ("chunk", value) if isinstance(value, str) else ("data", json.dumps(value))
                entry = (f"{b}-{n}", {"t": kind, "d": body, "a": str(number)})
                self.states.append([*self.states[-1], entry][-max_len:])
        end = {"t": "completed", "d": json.dumps(result), "a": str(len(attempts)), "n": str(n)}
        self.states.append([*self.states[-1], (f"{b + 60_000}-0", end)])

    def read(self, since: int, after: str | None = None) -> Iterator[tuple[int, Event[Any]]]:
        """Connect after step `since` and stay: each event with the step after which it was read."""
        tail = Tail(Keys("q"), "id", QUEUE, after=after)
        for step in range(since, len(self.states)):
            for event in self._fetch(tail, self.states[step]):
                yield step, event

    @staticmethod
    def _fetch(tail: Tail[Any], stream: list[Entry]) -> list[Event[Any]]:
        out: list[Event[Any]] = []
        for _ in range(4):  # read, and what a read that found nothing asks next
            call = tail.poll()
            if call.args[0] == "HMGET":
                record = {"id": b"id", "status": b"active", "attempt": b"1", "gen": str(GEN).encode()}
                reply: Any = [record.get(name) for name in call.args[2:]]
            elif call.args[0] == "XREVRANGE":
                reply = _rows(stream[-1:])
            else:
                found = [entry for entry in stream if _at(entry[0]) > _at(call.args[-1])]
                reply = [[b"key", _rows(found)]] if found else None
            out += tail.feed(call.decode(reply))
            if tail.done:
                break
        return out


def _at(id: str) -> tuple[int, int]:
    ms, _, n = id.partition("-")
    return int(ms), int(n)


def _rows(entries: list[Entry]) -> list[Any]:
    return [[id.encode(), [part.encode() for pair in fields.items() for part in pair]] for id, fields in entries]
