"""The declaration of a queue: what producers, watchers and workers agree on. No I/O happens here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from ._checks import Duration, check_amounts, check_count, check_queue_name, to_ms
from .codec import codec_for
from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import TypeForm, TypeVar

    # What is not declared is Any. Only checkers see the default: typing has it from Python 3.13 on.
    P = TypeVar("P", default=Any)
    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")
    R = TypeVar("R")

__all__ = ["Queue", "check_queue"]

_ANY: Any = Any


class Queue(Generic[P, R]):
    """A queue that is called `name` and holds payloads of type `payload` and results of type `result`.

    A plain ``Queue(name)`` is ``Queue[Any, Any]``: any JSON. `payload` and `result` are any type that pydantic knows,
    or an object with ``encode(value) -> str`` and ``decode(text) -> value`` (a `Codec`).

    All durations are seconds or timedelta:

    - `max_attempts` (3): takes of a job before it is dead-lettered.
    - `timeout` (1 h): the longest that one attempt may run.
    - `lease` (60 s): how long a silent worker owns a job; it is renewed by streaming and by heartbeats, so it says
      how soon a dead worker's job is found, not how long a job may run.
    - `backoff`, `max_backoff` (1 s, 60 s): an attempt n that failed waits between 0 and
      ``min(max_backoff, backoff * 2**(n-1))``, drawn evenly ("full jitter").
    - `result_ttl` (1 h): how long a finished record and its output are kept. At least 1 s; a quiet reader over HTTP
      polls every 2 s, so below some 10 s it may come too late.
    - `idempotency_ttl` (= `result_ttl`): how long a key answers after its job has completed; never longer than the
      record, which is cut to `result_ttl`.
    - `dead_ttl` (7 days): how long a dead-lettered job is kept.
    - `events_max_len` (10,000): events kept for each job; older ones are trimmed and readers get a `Gap`.
    - `max_payload`, `max_result`, `max_step` (1 MiB, 4 MiB, 1 MiB): UTF-8 bytes of the JSON text. Larger inputs
      belong in a store of their own, with a reference in the payload.
    - `budget` (none): the most that a job may use over all its attempts, by the counters of ``job.usage``:
      ``{"cost": 0.5, "output_tokens": 20_000}``. A job that exceeds it has failed for good.
    - `check_payload` (True): the same idempotency key with another payload raises IdempotencyConflictError.
    """

    __slots__ = (
        "backoff_ms",
        "budget",
        "check_payload",
        "dead_ttl_ms",
        "events_max_len",
        "idempotency_ttl_ms",
        "lease_ms",
        "max_attempts",
        "max_backoff_ms",
        "max_payload",
        "max_result",
        "max_step",
        "name",
        "payload_codec",
        "result_codec",
        "result_ttl_ms",
        "timeout_ms",
    )

    def __init__(
        self,
        name: str,
        *,
        payload: TypeForm[P] = _ANY,
        result: TypeForm[R] = _ANY,
        max_attempts: int = 3,
        timeout: Duration = 3600.0,
        lease: Duration = 60.0,
        backoff: Duration = 1.0,
        max_backoff: Duration = 60.0,
        result_ttl: Duration = 3600.0,
        idempotency_ttl: Duration | None = None,
        dead_ttl: Duration = 7 * 86_400.0,
        events_max_len: int = 10_000,
        max_payload: int = 1024 * 1024,
        max_result: int = 4 * 1024 * 1024,
        max_step: int = 1024 * 1024,
        check_payload: bool = True,
        budget: Mapping[str, float] | None = None,
    ) -> None:
        self.name = check_queue_name(name, hooks=True)
        self.payload_codec = codec_for(payload, "payload")
        self.result_codec = codec_for(result, "result")
        self.max_attempts = check_count(max_attempts, "max_attempts", most=1_000_000)
        self.timeout_ms = to_ms(timeout, "timeout", least=0.001)
        self.lease_ms = to_ms(lease, "lease", least=0.1, most=86_400)
        self.backoff_ms = to_ms(backoff, "backoff")
        self.max_backoff_ms = to_ms(max_backoff, "max_backoff")
        if self.max_backoff_ms < self.backoff_ms:
            raise InvalidArgumentError(f"max_backoff={max_backoff!r} is below backoff={backoff!r}; raise it")
        self.result_ttl_ms = to_ms(result_ttl, "result_ttl", least=1)
        self.idempotency_ttl_ms = (
            self.result_ttl_ms if idempotency_ttl is None else to_ms(idempotency_ttl, "idempotency_ttl")
        )
        self.dead_ttl_ms = to_ms(dead_ttl, "dead_ttl", least=1)
        self.events_max_len = check_count(events_max_len, "events_max_len", least=10, most=10_000_000)
        self.max_payload = check_count(max_payload, "max_payload", most=512 * 1024 * 1024)
        self.max_result = check_count(max_result, "max_result", most=512 * 1024 * 1024)
        self.max_step = check_count(max_step, "max_step", most=512 * 1024 * 1024)
        self.check_payload = check_payload
        self.budget = check_amounts(budget or {}, "budget")

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    # -- payloads and results, with their limits ---------------------------------------------------------------

    def encode_payload(self, value: P) -> str:
        """The payload's text. Raises InvalidArgumentError without quoting the payload."""
        return self._encode(self.payload_codec, value, "payload", self.max_payload, "max_payload")

    def encode_result(self, value: R) -> str:
        """The result's text. Raises InvalidArgumentError without quoting the result."""
        return self._encode(self.result_codec, value, "result", self.max_result, "max_result")

    def _encode(self, codec: Any, value: Any, what: str, limit: int, option: str) -> str:
        try:
            text = codec.encode(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{what} of queue {self.name!r}: {error}") from None
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"{what} of queue {self.name!r}: its codec raised {type(error).__name__}"
            ) from error
        if not isinstance(text, str):
            raise InvalidArgumentError(
                f"{what} of queue {self.name!r}: its codec returned {type(text).__name__}, not str"
            )
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"{what} of queue {self.name!r}: its codec returned half a surrogate pair, which UTF-8 cannot hold"
            ) from None
        if size > limit:
            raise InvalidArgumentError(
                f"{what} of queue {self.name!r} has {size} bytes of JSON; the limit is {limit}: store it elsewhere "
                f"and pass a reference, or raise {option}"
            )
        return text

    def _decode(self, codec: Any, text: str, what: str) -> Any:
        from .errors import ReplyShapeError

        try:
            return codec.decode(text)
        except ReplyShapeError as error:
            raise ReplyShapeError(f"{what} of queue {self.name!r}: {error}") from None
        except (ValueError, TypeError) as error:
            raise ReplyShapeError(f"{what} of queue {self.name!r}: its codec raised {type(error).__name__}") from error

    def decode_payload(self, text: str) -> P:
        """The payload of a stored text. Raises ReplyShapeError without quoting it."""
        value: P = self._decode(self.payload_codec, text, "payload")
        return value

    def decode_result(self, text: str) -> R:
        """The result of a stored text. Raises ReplyShapeError without quoting it."""
        value: R = self._decode(self.result_codec, text, "result")
        return value


def check_queue(value: object) -> None:
    """A declaration, where its name alone may be given by mistake."""
    if not isinstance(value, Queue):
        raise InvalidArgumentError(f"queue is {type(value).__name__}; give a Queue, as in Queue('name')")
