"""Steps: the values of what a job has finished, kept so that no later attempt pays for them again."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from outlast._checks import check_id
from outlast.codec import JsonCodec, TypedCodec, codec_for
from outlast.errors import InvalidArgumentError, OutlastError, StepValueError, StoreFullError
from outlast.protocol import holding
from outlast.protocol.calls import Call
from outlast.transport import is_transient

from .output import PATIENCE
from .policy import encode_mended

if TYPE_CHECKING:
    from outlast.codec import Codec
    from outlast.queue import Queue
    from outlast.transport import AsyncTransport

    from .leases import Lease

__all__ = ["Step", "Steps", "in_thread", "is_coroutine_function"]

T = TypeVar("T")


class Step:
    """A step's name and how its value becomes text. Made before the step runs: what cannot be kept is not paid for."""

    def __init__(self, queue: Queue[Any, Any], name: str, function: Any, type_: Any) -> None:
        self.name = check_id(name, "name of a step")
        self._queue = queue
        self._codec = _codec_of(name, function, type_)

    def encode(self, value: Any) -> str:
        """Raises StepValueError: another attempt would pay for the same value, and could not keep it either."""
        try:
            return encode_mended(self._encode, value)
        except InvalidArgumentError as error:
            raise StepValueError(str(error)) from error

    def _encode(self, value: Any) -> str:
        what = f"the value of step {self.name!r}"
        return self._queue._encode(self._codec, value, what, self._queue.max_step, "max_step")

    def decode(self, text: str) -> Any:
        return self._queue._decode(self._codec, text, f"the kept value of step {self.name!r}")


def _codec_of(name: str, function: Any, type_: Any) -> Codec[Any]:
    """By `type_`, else by what the function is annotated to return, else plain JSON."""
    function = getattr(function, "func", function)  # of a partial
    if type_ is None:
        annotations: dict[str, Any] = getattr(function, "__annotations__", {})
        if "return" not in annotations:
            return JsonCodec()
        hints = SimpleNamespace(__annotations__={"return": annotations["return"]})
        try:
            type_ = get_type_hints(hints, getattr(function, "__globals__", {}))["return"]
        except Exception as error:
            raise InvalidArgumentError(
                f"step {name!r}: what {function!r} is annotated to return is not known here ({error}); give type=..."
            ) from error
        if inspect.isclass(origin := get_origin(type_)) and issubclass(origin, Awaitable):
            type_ = get_args(type_)[-1]
    codec = codec_for(type_, "type")
    if isinstance(codec, TypedCodec):
        try:
            codec._get()
        except Exception as error:
            raise InvalidArgumentError(
                f"step {name!r}: values of {type_!r} cannot be kept as JSON; return a pydantic model, or give type=..."
            ) from error
    return codec


class Steps:
    """The steps of one attempt. Everything here runs on the worker's event loop."""

    def __init__(
        self,
        transport: AsyncTransport,
        lease: Lease,
        *,
        report: Callable[[holding.Held], None],
        trouble: Callable[[OutlastError], None],
        hopeless: Callable[[], bool],
        count: Callable[[int], None],
    ) -> None:
        self._transport = transport
        self._lease = lease
        self._report = report
        self._trouble = trouble
        self._hopeless = hopeless
        self._count = count
        self._kept: dict[str, str] = {}
        self._stale = False
        self._loading: asyncio.Task[None] | None = None
        self._begun: set[str] = set()
        self._saving: set[asyncio.Task[None]] = set()
        self._inside: Counter[asyncio.Task[Any] | None] = Counter()
        """Tasks that run a step, and how many: steps nest."""
        self._quiet: asyncio.Future[None] | None = None
        """Set once the handler has failed: done when no step runs any more."""

    @contextmanager
    def running(self) -> Generator[None]:
        """For as long as a step runs."""
        if self._quiet is not None:
            raise asyncio.CancelledError("the handler has ended")
        task = asyncio.current_task()
        self._inside[task] += 1
        try:
            yield
        finally:
            self._inside[task] -= 1
            self._inside += Counter()  # forgets those that are out
            if self._quiet is not None and not self._inside and not self._quiet.done():
                self._quiet.set_result(None)

    async def leave(self, *, wait: bool) -> None:
        """The handler has failed, and ``asyncio.gather`` leaves the other steps running: what is paid for is kept.

        They may end unless `wait` is False or this is cancelled, and no more steps begin; what comes after them in
        their tasks does not run.
        """
        left = set(self._inside)
        self._quiet = asyncio.get_running_loop().create_future()
        try:
            if left and wait:
                await self._quiet
        finally:
            for task in left:
                if task is not None:
                    task.cancel()

    @property
    def any(self) -> bool:
        """Whether there are steps in the database, as far as this attempt knows."""
        return bool(self._kept) or self._stale

    async def begin(self, name: str) -> str | None:
        """The value that an earlier attempt kept, None if this one must run the step."""
        if name in self._begun:
            # Two chunks under one name would get one value, and nobody would notice.
            raise InvalidArgumentError(f"step {name!r} has run in this attempt already; give each step its own name")
        self._begun.add(name)
        try:
            if self._loading is None:
                self._loading = _task(self._load())
            # One read for all steps that begin at once; it goes on when one of them is cancelled.
            await asyncio.shield(self._loading)
        except BaseException:
            self.fail(name)
            raise
        return self._kept.get(name)

    def fail(self, name: str) -> None:
        """The step did not finish; it may be begun again."""
        self._begun.discard(name)

    async def keep(self, name: str, text: str) -> None:
        """Store a value, and return once it is stored. Raises StoreFullError when there is no memory for it."""
        task = _task(self._save(name, text))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        await asyncio.shield(task)  # it was paid for: it is stored even if the handler is stopped now

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await in_thread(call, self._count)

    async def close(self) -> None:
        """Let the last values arrive before the job is given away, which needs the database just the same."""
        if self._saving:
            await asyncio.wait(self._saving)

    async def _load(self) -> None:
        try:
            found = await self._send(holding.steps(self._lease.keys, self._lease.job))
        except OutlastError:
            self._loading = None
            raise
        if found is None:
            self._report("lost")
        else:
            self._kept, self._stale = found

    async def _save(self, name: str, text: str) -> None:
        held = await self._send(
            holding.step(self._lease.keys, self._lease.job, name=name, value=text, stale=self._stale)
        )
        if held is None or held == "lost":
            self._report("lost")
            return
        self._kept[name] = text
        if held != "ok":
            self._report(held)

    async def _send(self, call: Call[T]) -> T | None:
        """Send until it is answered; None once somebody else may have the job."""
        loop = asyncio.get_running_loop()
        pause, patience = 0.05, loop.time() + PATIENCE
        while not self._hopeless():
            try:
                return await self._transport.send(call)
            except OutlastError as error:
                if not is_transient(error) and (not isinstance(error, StoreFullError) or loop.time() > patience):
                    raise
                self._trouble(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 0.5)
        return None


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work, name="outlast step")
    # Whoever waited for it may be gone when it fails.
    task.add_done_callback(lambda task: None if task.cancelled() else task.exception() and None)
    return task


def is_coroutine_function(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def in_thread(call: Callable[[], T], count: Callable[[int], None] = lambda _: None) -> T:
    """What `call` returns, run in a thread of its own: a pool would wait for a stuck one when the process ends.

    `count` is told +1 now and -1 when it returns, whether or not somebody still waits for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(value: Any, failure: BaseException | None) -> None:
        count(-1)
        if future.done():
            return  # nobody waits any more
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)

    def run() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = call()
        except StopIteration as error:
            failure = RuntimeError("the function raised StopIteration")  # no future can hold one
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the worker has ended without this thread
            loop.call_soon_threadsafe(tell, value, failure)
        failure = None  # this frame is in its traceback

    count(1)
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="outlast step", daemon=True).start()
    return await future
