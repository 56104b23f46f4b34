"""Many jobs at once: what is asked for, how it is cut into requests, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._checks import check_several
from .errors import BulkEnqueueError, InvalidArgumentError, OutlastError, TransportError
from .records import Enqueued

if TYPE_CHECKING:
    from ._base import JobsBase, Order
    from ._checks import Duration
    from .protocol import Call

__all__ = ["Batch", "NewJob"]

P = TypeVar("P")

MOST = 10_000
"""Jobs of one call. Their ids and outcomes are all in memory."""
CALLS, CHARACTERS = 1_000, 2_000_000
"""What one request holds at most, if it holds more than one job. Other people's commands run between its own."""


@dataclass(frozen=True, slots=True, repr=False)
class NewJob(Generic[P]):
    """A job for enqueue_many. The options are those of `enqueue`."""

    payload: P
    _: KW_ONLY
    id: str | None = None
    idempotency_key: str | None = None
    idempotency_ttl: Duration | None = None
    priority: int = 0
    delay: Duration = 0.0
    max_attempts: int | None = None
    timeout: Duration | None = None
    expires: Duration | None = None
    deadline: Duration | None = None
    result_ttl: Duration | None = None
    owner: str | None = None
    webhook: str | None = None
    budget: Mapping[str, float] | None = None


_OPTIONS = [one.name for one in fields(NewJob) if one.name != "payload"]


class Batch:
    """The jobs of one enqueue_many, all checked, and their outcomes as these come in."""

    def __init__(self, jobs: JobsBase[Any, Any], wanted: Iterable[Any], trace: str | None) -> None:
        self._orders: list[Order] = []
        self._outcomes: list[Enqueued | OutlastError] = []
        self._sent = 0
        check_several(wanted, "jobs")
        for at, one in enumerate(wanted):
            if at == MOST:
                raise InvalidArgumentError(f"jobs has more than {MOST}; enqueue them in parts")
            new: NewJob[Any] = one if isinstance(one, NewJob) else NewJob(one)  # pyright: ignore[reportUnknownVariableType]
            try:
                order = jobs._order(new.payload, **{name: getattr(new, name) for name in _OPTIONS}, trace=trace)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"job {at} of jobs: {error}") from error.__cause__
            self._orders.append(order)

    def next(self) -> list[Call[Enqueued]]:
        """The calls of the next request; none when all is done."""
        self._sent = len(self._outcomes)
        calls: list[Call[Enqueued]] = []
        size = 0
        for order in self._orders[self._sent : self._sent + CALLS]:
            size += sum(map(len, order.call.args))
            if calls and size > CHARACTERS:
                break
            calls.append(order.call)
        self._sent += len(calls)
        return calls

    def answered(self, answers: list[Any]) -> None:
        self._outcomes += answers

    def failed(self, error: TransportError) -> None:
        """No answer: the rest is not tried, which would take as long again for each request."""
        for at, order in enumerate(self._orders[len(self._outcomes) :], len(self._outcomes)):
            own = TransportError(str(error), maybe_applied=error.maybe_applied, status=error.status)
            if at >= self._sent:
                own = TransportError("not sent: the request before it failed", maybe_applied=False)
            own.__cause__ = error
            own.job_id = order.id
            self._outcomes.append(own)

    @property
    def made(self) -> list[Enqueued]:
        return [outcome for outcome in self._outcomes if isinstance(outcome, Enqueued)]

    def result(self, sync_token: str | None) -> list[Enqueued]:
        """The answers. Raises BulkEnqueueError unless there is one for each job."""
        if sync_token is not None:
            self._outcomes = [
                replace(outcome, sync_token=sync_token) if isinstance(outcome, Enqueued) else outcome
                for outcome in self._outcomes
            ]
        errors = [outcome for outcome in self._outcomes if isinstance(outcome, OutlastError)]
        if errors:
            raise BulkEnqueueError(
                f"{len(errors)} of {len(self._outcomes)} jobs were not made, or not surely; the first of these: "
                f"{type(errors[0]).__name__}: {errors[0]}",
                self._outcomes,
            ) from errors[0]
        return self.made
