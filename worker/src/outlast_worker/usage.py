"""What a job has used over all its attempts, and how much it may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from threading import Lock, get_ident

from outlast._checks import MAX_COUNTERS, check_amounts
from outlast.errors import BudgetExceededError, InvalidArgumentError
from outlast.protocol.calls import amounts_of
from outlast.protocol.holding import Reserved, Used

from .output import Output

__all__ = ["Usage"]


class Usage:
    """The counters of one job. `add` is for any thread, the rest for the worker's event loop."""

    _lock = Lock()
    """Of all jobs: it is held for moments."""

    def __init__(
        self,
        job: Reserved,
        budget: Mapping[str, float],
        output: Output,
        loop: asyncio.AbstractEventLoop,
        thread: int,
    ) -> None:
        """`thread`: the one that the loop runs in."""
        self._job = job
        self._amounts = amounts_of(job.usage)
        self._budget = dict(budget)
        for counter, most in amounts_of(job.budget).items():  # a request may only lower
            self._budget[counter] = min(most, self._budget.get(counter, most))
        self._output = output
        self._loop = loop
        self._thread = thread

    def add(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Count `amounts`, and write the sums with the next flush. Raises BudgetExceededError."""
        checked = {counter: amount for counter, amount in check_amounts(amounts, "usage").items() if amount}
        with self._lock:
            names = self._amounts.keys() | checked.keys()
            if len(names) > max(MAX_COUNTERS, len(self._amounts)):
                # Each is a field of the day's totals, and the script that ends the job names them all.
                raise InvalidArgumentError(f"usage: {len(names)} counters in this job; give at most {MAX_COUNTERS}")
            for counter, amount in checked.items():
                self._amounts[counter] = _sum(self._amounts.get(counter, 0), amount)
            amounts_now, text = dict(self._amounts), self._text()
            if checked and get_ident() == self._thread:
                self._output.write_usage(text)  # now, so that a flush() that follows waits for it
            elif checked:
                with suppress(RuntimeError):  # the worker has ended without this thread
                    self._loop.call_soon_threadsafe(self._output.write_usage, text)
        if (over := self.exceeded()) is not None:
            raise over
        return amounts_now

    def exceeded(self) -> BudgetExceededError | None:
        for counter, most in self._budget.items():
            if (used := self._amounts.get(counter, 0)) > most:
                return BudgetExceededError(f"the job has used {used:g} {counter}; its budget is {most:g}")
        return None

    def used(self, now_ms: int) -> Used:
        """What is to be written down as the job is given away."""
        if not self._amounts or (text := self._text()) == self._job.counted:
            return Used()
        counted = amounts_of(self._job.counted)
        more = [(name, _sum(amount, -counted.get(name, 0))) for name, amount in self._amounts.items()]
        day = str(datetime.fromtimestamp(now_ms / 1000, UTC).date())
        return Used(text, day, [(name, json.dumps(amount)) for name, amount in more if amount])

    @property
    def spent(self) -> dict[str, float]:
        """What this attempt has added."""
        before = amounts_of(self._job.usage)
        more = {name: _sum(amount, -before.get(name, 0)) for name, amount in self._amounts.items()}
        return {name: amount for name, amount in more.items() if amount}

    def _text(self) -> str:
        return json.dumps(self._amounts, ensure_ascii=False, separators=(",", ":"))


def _sum(one: float, two: float) -> float:
    """Rounded to what money and tokens need: 0.1 + 0.2 is 0.3."""
    return one + two if isinstance(one, int) and isinstance(two, int) else round(one + two, 12)
