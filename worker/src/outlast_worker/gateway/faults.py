"""Test switches: what a gateway can be told to do wrong.

    faults = Faults()
    faults.drop_reply(command="EVALSHA")             # runs the next EVALSHA, then cuts the connection
    faults.delay(0.5, times=None, every=3)           # every third request, until cleared
    faults.canned("quota", times=2)                  # Upstash's answer when the month's commands are used up
    rule = faults.silence()                          # takes the request and never answers
    rule.wait()                                      # until it has happened

Every switch takes `times` (how often; None for ever), `every` (only each k-th match) and `command` (only requests that
contain it). Rules apply in the order in which they were armed. Over HTTP, with the database's token and only if the
configuration holds a `Faults`: POST /-/faults `{"action": "drop_reply", "command": "EVALSHA"}`, with the arguments of
the methods here; GET lists, DELETE clears.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from outlast import InvalidArgumentError

Action = Literal["drop_reply", "delay", "silence", "trickle", "reply", "error", "replica_lag"]
NOSCRIPT: Final = "NOSCRIPT No matching script. Please use EVAL."

_JSON: Final = {"content-type": "application/json; charset=utf-8"}
_QUOTA = (
    b'{"error":"ERR max requests limit exceeded. Limit: 500000, Usage: 500000. See https://upstash.com/docs/redis/'
    b'troubleshooting/max_requests_limit for details"}'
)
CANNED: Final[Mapping[str, Mapping[str, Any]]] = {
    "html_502": {
        "status": 502,
        "headers": {"content-type": "text/html"},
        "body": b"<html><h1>502 Bad Gateway</h1></html>",
    },
    "cut_json": {"status": 200, "headers": _JSON, "body": b'{"result":"eyJzdGF0'},
    "cut_connection": {"status": 200, "headers": _JSON, "body": b'{"result":"eyJzdGF0', "cut": True},
    "quota": {"status": 400, "headers": _JSON, "body": _QUOTA},
    "rate_limited": {
        "status": 429,
        "headers": {**_JSON, "retry-after": "1"},
        "body": b'{"error":"ERR too many requests"}',
    },
    "unavailable": {"status": 503, "headers": {"retry-after": "1"}, "body": b""},
    "redirect": {"status": 301, "headers": {"location": "https://elsewhere.invalid/"}, "body": b""},
    "wrong_charset": {
        "status": 200,
        "headers": {"content-type": "application/json; charset=iso-8859-1"},
        "body": '{"result":"é"}'.encode("latin-1"),
    },
    "huge": {"status": 200, "headers": _JSON, "body": b'{"result":"' + b"x" * 1000 + b'"}', "size": 50_000_000},
    "empty": {"status": 200, "headers": _JSON, "body": b""},
}


_KINDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("every", "status", "size"), int),
    **dict.fromkeys(("executed", "cut"), bool),
    "times": (int, type(None)),
    "command": (str, type(None)),
    "seconds": (int, float),
    "headers": Mapping,
    "body": bytes,
    "text": str,
    "pattern": str,
}
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(eq=False)
class Rule:
    """One armed switch. `fired` counts how often it has acted."""

    action: Action
    times: int | None = 1
    every: int = 1
    command: str | None = None
    executed: bool = True
    seconds: float = 0.0
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = field(default=b"", repr=False)
    size: int = 0
    cut: bool = False
    text: str = ""
    pattern: str = "*"
    fired: int = 0
    _seen: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def wait(self, times: int = 1, timeout: float = 10.0) -> None:
        """Block until the rule has fired `times` times (from async code: `await asyncio.to_thread(rule.wait)`)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.fired >= times, timeout):
                raise TimeoutError(f"{self.action} fired {self.fired} times in {timeout:g} s, not {times}")

    @property
    def spent(self) -> bool:
        return self.times is not None and self.fired >= self.times

    def fires(self, names: Sequence[str]) -> bool:
        if self.spent or (self.command is not None and self.command not in names):
            return False
        self._seen += 1
        if self._seen % self.every:
            return False
        with self._changed:
            self.fired += 1
            self._changed.notify_all()
        return True

    @property
    def summary(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("action", "command", "times", "every", "fired")}

    @property
    def content(self) -> bytes:
        """The canned body, stretched to `size`."""
        if self.size <= len(self.body):
            return self.body
        half = len(self.body) // 2
        return self.body[:half] + b"x" * (self.size - len(self.body)) + self.body[half:]


class Faults:
    """The switches of one gateway; all off. Arm them from any thread."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def drop_reply(self, *, executed: bool = True, **when: Any) -> Rule:
        """Cut the connection instead of answering; the commands have run (or, `executed=False`, have not)."""
        return self._arm("drop_reply", executed=executed, **when)

    def delay(self, seconds: float, *, executed: bool = False, **when: Any) -> Rule:
        """Wait before the commands run (or, `executed=True`, before their answer leaves)."""
        return self._arm("delay", seconds=seconds, executed=executed, **when)

    def silence(self, *, executed: bool = False, **when: Any) -> Rule:
        """Keep the connection open and never answer."""
        return self._arm("silence", executed=executed, **when)

    def trickle(self, seconds: float = 0.01, **when: Any) -> Rule:
        """Send the answer byte by byte, `seconds` apart."""
        return self._arm("trickle", seconds=seconds, **when)

    def reply(
        self, status: int = 200, headers: Mapping[str, str] | None = None, body: bytes = b"", **when: Any
    ) -> Rule:
        """Answer this, running nothing. `size` stretches the body; `cut=True` ends the connection before its end."""
        return self._arm("reply", status=status, headers=dict(headers or {}), body=body, **when)

    def canned(self, name: str, **when: Any) -> Rule:
        """One of the ready-made replies: see CANNED."""
        if name not in CANNED:
            raise InvalidArgumentError(f"canned reply {name!r} is unknown; there are {', '.join(CANNED)}")
        return self.reply(**{**CANNED[name], **when})

    def error(self, text: str, **when: Any) -> Rule:
        """Answer a command (not the whole request) with this error, running nothing: LOADING, BUSY, READONLY …"""
        return self._arm("error", text=text, **when)

    def noscript(self, times: int | None = 1, **when: Any) -> Rule:
        """Pretend that the script cache is empty."""
        return self.error(NOSCRIPT, times=times, **{"command": "EVALSHA", **when})

    def replica_lag(self, pattern: str = "*", *, times: int | None = None, **when: Any) -> Rule:
        """Serve reads from a copy of the database that stands still from the next request on.

        Requests that show a sync token of a later write, or that write themselves, are served as ever. `pattern`: only
        requests with an argument that matches it (as in fnmatch) see the copy, since keys replicate each on its own.
        """
        return self._arm("replica_lag", pattern=pattern, times=times, **when)

    @property
    def lag(self) -> Rule | None:
        return next((rule for rule in self.rules if rule.action == "replica_lag" and not rule.spent), None)

    def clear(self) -> None:
        """Switch everything off."""
        self.rules = []

    def for_request(self, names: Sequence[str]) -> list[Rule]:
        """The rules that act on a request of these commands, each counted as fired."""
        return [rule for rule in self.rules if rule.action not in ("error", "replica_lag") and rule.fires(names)]

    def for_command(self, name: str) -> str | None:
        """The error that this command gets instead of being run, if any."""
        return next((rule.text for rule in self.rules if rule.action == "error" and rule.fires([name])), None)

    def arm(self, wish: Mapping[str, Any]) -> Rule:
        """Arm what a JSON object asks for: `action`, a method's name, and its arguments."""
        arguments = dict(wish)
        action = arguments.pop("action", None)
        if action not in (
            "drop_reply",
            "delay",
            "silence",
            "trickle",
            "reply",
            "canned",
            "error",
            "noscript",
            "replica_lag",
        ):
            raise InvalidArgumentError(f"action={action!r} is no test switch")
        if isinstance(arguments.get("body"), str):
            arguments["body"] = cast("str", arguments["body"]).encode()
        try:
            return cast("Rule", getattr(self, action)(**arguments))
        except TypeError as error:
            raise InvalidArgumentError(f"{action}: {error}") from None

    def _arm(self, action: Action, **settings: Any) -> Rule:
        rule = Rule(action, **settings)
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(rule, name), kinds):
                raise InvalidArgumentError(f"{name}={getattr(rule, name)!r} is a {type(getattr(rule, name)).__name__}")
        if rule.every < 1 or (rule.times is not None and rule.times < 1):
            raise InvalidArgumentError(
                f"every={rule.every} and times={rule.times} must be at least 1 (times may be None)"
            )
        if not 200 <= rule.status <= 599:
            raise InvalidArgumentError(f"status={rule.status} is no status of an answer: 200 to 599")
        headers: Mapping[Any, Any] = rule.headers  # from JSON, so of any kind
        for name, value in headers.items():
            if not (_HEADER_NAME.fullmatch(str(name)) and isinstance(value, str) and value.isprintable()):
                raise InvalidArgumentError(f"headers: {name!r} cannot be sent with the value {value!r}")
        if rule.command is not None:
            rule.command = rule.command.upper()
        self.rules = [r for r in self.rules if not r.spent]
        self.rules.append(rule)
        return rule
