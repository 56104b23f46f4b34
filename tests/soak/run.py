"""Producers, workers, watchers and cancellers on one queue, while everything around them breaks."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from tests.faults.audit import audit_calls, audit_history, audit_keys, read_aof, read_calls, read_history, summary
from tests.faults.links import Proxy
from tests.faults.processes import ROOT, frozen, until
from tests.faults.servers import full, journalled, restart, stalled
from tests.soak.jobs import LEASE, QUEUE, text_of

from outlast import AsyncClient, AsyncJobs, OutlastError, Queue, TransportError
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

WORKERS = 3
OUTSTANDING = 40
"""Jobs that are on their way at a time, for each worker."""
PER_MINUTE = (2000, 200)
"""Jobs and faults that a minute must have seen; a slow machine gets three times as long (40 s to 5 minutes more)."""
KINDS = {
    **{"cut": (5, "link"), "drop reply": (11, "link"), "black hole": (6, "link"), "down": (6, "link")},
    **{"delay": (6, "link"), "trickle": (6, "link")},
    **{"kill -9": (7, "worker"), "SIGSTOP": (7, "worker"), "SIGTERM": (3, "worker"), "SIGTERM twice": (3, "worker")},
    **{"standstill": (3, "server"), "restart": (2, "server"), "full memory": (2, "server")},
    **{"scripts forgotten": (2, "keys"), "doorbells lost": (2, "keys"), "clients thrown out": (2, "keys")},
    **{"lost reply": (9, "gateway"), "late": (4, "gateway"), "silence": (4, "gateway"), "slow": (4, "gateway")},
    **{"nonsense": (5, "gateway"), "refusal": (5, "gateway")},
}
"""What may break: how often, compared with the rest, and whose."""
DRAIN = 120.0
"""Seconds after the last fault within which everything must have ended."""
DOUBLES = ("settled twice", "run after its end")
SECONDS_APART = 0.16
TOKEN = "t" * 32
ODD = ("the worker itself failed", "never retrieved", "given up", "Exception ignored", "Fatal", "raised; the job")
"""What a worker must never log, whatever happens around it."""


@dataclass
class Told:
    """A job as its producer knows it."""

    id: str
    words: int
    end: str
    silent: bool
    cancel: str = ""
    """What the canceller was told: "", yes, no, or unknown."""
    seen: tuple[str, Any] | None = None
    """How it ended, for its watcher."""


@dataclass
class Report:
    seed: int
    workers: int
    seconds: float = 0.0
    short: str = ""
    """What the run did not get to, for want of time."""
    jobs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, findings: list[str]) -> None:
        for line in findings:
            rule = line.partition(":")[0]
            (self.lost if rule == "lost" else self.doubled if rule in DOUBLES else self.wrong).append(line)

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    def lines(self) -> Iterator[str]:
        for name in ("lost", "doubled", "wrong"):
            yield from (f"{name}: {line}" for line in getattr(self, name)[:20])
        yield f"seed {self.seed}, {self.seconds:.0f} s, {self.workers} workers with a lease of {LEASE:g} s"
        if self.short:
            yield f"short: {self.short}"
        yield "jobs " + _told(self.jobs, "accepted")
        yield f"faults {self.faults.total()}: " + _told(self.faults)
        yield from (f"{name} {len(getattr(self, name))}" for name in ("lost", "doubled", "wrong"))


def _told(count: Counter[str], *first: str) -> str:
    names = [*first, *sorted(count.keys() - set(first))]
    return ", ".join(f"{count[name]} {name}" for name in names)


class Soak:
    def __init__(
        self,
        seconds: float,
        seed: int,
        folder: Path,
        *,
        workers: int = WORKERS,
        kinds: Sequence[str] = tuple(KINDS),
        at_least: tuple[float, float] | None = None,
    ) -> None:
        self.report = Report(seed, workers)
        self.kinds = kinds
        self.at_least = at_least or (PER_MINUTE[0] * seconds / 60, PER_MINUTE[1] * seconds / 60)
        self.rng = random.Random(seed)
        self.seconds = seconds
        self.folder = folder
        self.told: dict[str, Told] = {}
        self.unsure: set[str] = set()
        """Ids of enqueues whose outcome was unknown: such a job may exist."""
        self.on_its_way = 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self.blind: list[tuple[int, float, float]] = []
        """When which process could not know what happens, in ms; 0 stands for all."""
        self.busy: set[str] = set()
        self.next_restart = 0.0
        self.tasks: set[asyncio.Task[None]] = set()

    # -- a run ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Report:
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            self.server = stack.enter_context(journalled())
            self.port = self.server.port
            self.url = self.server.connection_url
            self.links = [stack.enter_context(Proxy(self.url)) for _ in range(self.report.workers + 1)]
            self.calls = stack.enter_context((self.folder / "calls").open("a", buffering=1))
            self.log = stack.enter_context((self.folder / "workers.log").open("ab"))
            provider = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            stack.push_async_callback(_closed, provider)
            self.provider_port = provider.sockets[0].getsockname()[1]
            self.switches = Faults()
            database = Database(redis_url=self.url, token=TOKEN)
            gateway = await stack.enter_async_context(
                GatewayServer(GatewayConfig(databases=[database], faults=self.switches, timeout=5))
            )
            queue: Queue[Any, Any] = Queue(**QUEUE)
            self.fronts: dict[str, AsyncJobs[Any, Any]] = {
                "over HTTP": (await stack.enter_async_context(AsyncClient(gateway.url, TOKEN, timeout=5))).queue(queue),
                "over TCP": (await stack.enter_async_context(AsyncClient(redis_url=self.links[-1].url))).queue(queue),
            }
            stack.callback(self._kill_all)
            self.workers = [self._spawn(n) for n in range(self.report.workers)]
            await self._work()
            reached = (len(self.told), self.report.faults.total())
            if any(had < least for had, least in zip(reached, self.at_least, strict=True)):
                self.report.short = f"{reached[0]} jobs and {reached[1]} faults are fewer than {self.at_least}"
            await self._drain()
            await asyncio.to_thread(self._audit)
        self.report.seconds = time.monotonic() - began
        return self.report

    async def _work(self) -> None:
        wanted = self.at_least
        begin = time.monotonic()

        def going() -> bool:
            lasted = time.monotonic() - begin
            met = len(self.told) >= wanted[0] and self.report.faults.total() >= wanted[1]
            return lasted < self.seconds or (not met and lasted < max(40, min(3 * self.seconds, self.seconds + 300)))

        next_fault = begin
        while going():
            while self.on_its_way < OUTSTANDING * len(self.workers):
                self.on_its_way += 1
                self._do(self._one())
            # On a slow machine faults keep step with the jobs: else little but faults would happen there.
            jobs, faults = len(self.told) / wanted[0], self.report.faults.total() / wanted[1]
            if time.monotonic() >= next_fault and faults < 1.5 * jobs + 0.1:
                self._break_something()
                next_fault = time.monotonic() + self.rng.uniform(0.3, 1.7) * SECONDS_APART
            await asyncio.sleep(0.02)

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report.wrong.append(f"error: {error!r}")

    async def _drain(self) -> None:
        """No more faults: all that was accepted must end by itself, and all watchers with it."""
        end = time.monotonic() + DRAIN
        while self.tasks and time.monotonic() < end:
            await asyncio.wait(self.tasks, timeout=1)
        for task in list(self.tasks):
            self.report.wrong.append(f"hangs: {task.get_coro()!r}")
            task.cancel()
        self.switches.clear()
        with redis.Redis(port=self.port) as raw, suppress(AssertionError):  # the audit says what is left
            places = [f"{{soak}}:{place}" for place in ("ready", "scheduled", "leases")]
            await until(lambda: not any(map(raw.zcard, places)), "all jobs end", max(5, end - time.monotonic()))
        for process in self.workers:
            process.send_signal(signal.SIGTERM)
        for process in self.workers:
            code = await asyncio.to_thread(process.wait, 30)
            if code != 0:
                self.report.wrong.append(f"exit: a worker that was told to stop ended with {code}")

    # -- jobs ----------------------------------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The model: a word every 25 ms. It writes down who calls, and when they say they did."""
        with suppress(OSError):
            call = json.loads(await reader.readline() or b"null")
            if call is not None:
                self.calls.write(json.dumps(call) + "\n")
                for n in range(call["words"]):
                    writer.write(f"{call['start']}.{n} \n".encode())
                    await writer.drain()
                    await asyncio.sleep(0.025)
        writer.close()

    async def _one(self) -> None:
        """Enqueue a job, follow it or not, cancel it or not."""
        rng = self.rng
        way = rng.choice(("over HTTP", "over HTTP", "over TCP"))
        jobs = self.fronts[way]
        words = rng.randint(3, 20) if rng.random() < 0.95 else 60
        end = rng.choices(("done", "retry", "fail"), (82, 10, 8))[0]
        payload: dict[str, Any] = {"words": words, "end": end, "silent": rng.random() < 0.25}
        options: dict[str, Any] = {"idempotency_key": f"{rng.getrandbits(64):x}"}
        if rng.random() < 0.2:
            options["priority"] = rng.randint(1, 9)
        if rng.random() < 0.15:
            options["delay"] = rng.uniform(0.01, 0.6)
        try:
            id = await self._enqueue(jobs, payload, options)
            told = self.told[id] = Told(id, **payload)
            self.report.jobs["accepted"] += 1
            self.report.jobs[f"accepted {way}"] += 1
            acts = []
            if rng.random() < 0.7:
                self.report.jobs["watched"] += 1
                acts.append(self._watch(self.fronts[rng.choice((*self.fronts,))], told))
            if rng.random() < 0.15:
                acts.append(self._cancel(jobs, told))
            await asyncio.gather(*acts)
            await self._over(told)
        finally:
            self.on_its_way -= 1

    async def _enqueue(self, jobs: AsyncJobs[Any, Any], payload: Any, options: dict[str, Any]) -> str:
        """As an application does it: whatever goes wrong, look for the job, else ask again with the same key."""
        unsure: str | None = None
        while True:
            try:
                if unsure is not None and await jobs.get(unsure) is not None:
                    return unsure
                return (await jobs.enqueue(payload, **options)).id
            except TransportError as error:
                if error.job_id is not None and error.maybe_applied:
                    unsure = error.job_id
                    self.unsure.add(unsure)
            except OutlastError:
                pass  # refused: full, loading, …
            self.report.jobs["enqueues repeated"] += 1
            await asyncio.sleep(0.1)

    async def _watch(self, jobs: AsyncJobs[Any, Any], told: Told) -> None:
        text, last = "", None
        while True:
            try:
                async for event in jobs.watch(told.id, after=last):
                    last = event.id
                    match event.type:
                        case "restarted":
                            text = ""
                        case "chunk":
                            text += event.data
                            start = text.partition(".")[0]
                            if not start.isdigit() or not text_of(int(start), told.words).startswith(text):
                                self.report.wrong.append(f"text: job {told.id!r} reads {text!r}")
                        case "completed" | "failed" | "cancelled":
                            body = getattr(event, "result", getattr(event, "error", None))
                            told.seen = (event.type, body)
                            if event.type == "completed" and text != ("" if told.silent else body):
                                self.report.wrong.append(
                                    f"text: job {told.id!r} reads {text!r}, its result is {body!r}"
                                )
                            return
                        case "gap":
                            self.report.wrong.append(
                                f"gap: job {told.id!r} after {event.id} and {text!r}, before {event.first_available}"
                            )
                            text = ""
                        case _:
                            self.report.wrong.append(f"text: job {told.id!r} has a {event.type} in its output")
            except OutlastError:
                self.report.jobs["watches resumed"] += 1
                await asyncio.sleep(0.1)

    async def _cancel(self, jobs: AsyncJobs[Any, Any], told: Told) -> None:
        await asyncio.sleep(self.rng.random() ** 2)
        told.cancel = "unknown"
        while True:
            try:
                told.cancel = "yes" if await jobs.cancel(told.id) else "no"
                return
            except OutlastError:
                await asyncio.sleep(0.1)

    async def _over(self, told: Told) -> None:
        """A producer with nobody to watch looks now and then."""
        while told.seen is None:
            with suppress(OutlastError):
                job = await self.fronts["over TCP"].get(told.id)
                if job is None or job.status in ("completed", "failed", "cancelled"):
                    return
            await asyncio.sleep(0.3)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _break_something(self) -> None:
        """One fault more, unless its victim still suffers from another."""
        [kind] = self.rng.choices(self.kinds, [KINDS[kind][0] for kind in self.kinds])
        what = KINDS[kind][1]
        number = self.rng.randrange(len(self.links) if what == "link" else len(self.workers))
        victim = f"{what} {number}" if what in ("link", "worker") else what
        if victim in self.busy:
            return
        if kind == "restart":  # each takes longer than the one before, as there is more to read
            if time.monotonic() < self.next_restart:
                return
            self.next_restart = time.monotonic() + max(5, self.seconds / 50)

        async def suffer() -> None:
            self.busy.add(victim)
            try:
                if what == "link":
                    await self._break_link(kind, number)
                elif what == "worker":
                    await self._break_worker(kind, number)
                elif what == "server":
                    await self._break_server(kind)
                elif what == "keys":
                    await self._break_keys(kind)
                else:
                    await self._break_gateway(kind)
            finally:
                self.busy.discard(victim)

        self._do(suffer())

    @contextmanager
    def _fault(self, name: str, *, blinds: int | None = None) -> Iterator[None]:
        self.report.faults[name] += 1
        since = time.time() * 1000
        try:
            yield
        finally:
            if blinds is not None:
                self.blind.append((blinds, since, time.time() * 1000))

    def _while(self) -> float:
        """Seconds that a fault lasts: mostly a moment, sometimes longer than a lease and its grace."""
        return self.rng.uniform(0.05, 0.4) if self.rng.random() < 0.6 else self.rng.uniform(1.5, 2.5) * LEASE

    async def _break_link(self, kind: str, number: int) -> None:
        rng, link, workers = self.rng, self.links[number], self.workers
        pid = workers[number].pid if number < len(workers) else -1
        whose = "of a worker" if number < len(workers) else "of a producer"
        dropped = link.dropped
        with self._fault(f"{kind} {whose}", blinds=pid):
            match kind:
                case "cut":
                    await asyncio.to_thread(link.cut)
                case "drop reply":
                    link.drop_next = rng.randint(1, 3)
                case "black hole":
                    await asyncio.to_thread(link.hold, new=rng.random() < 0.6)
                case "delay":
                    link.delay = rng.uniform(0.02, 0.3)
                case "trickle":
                    link.trickle = rng.uniform(0.001, 0.02)
                case _:
                    await asyncio.to_thread(link.down)
            await asyncio.sleep(self._while())
            await asyncio.to_thread(link.heal)
        if kind == "drop reply" and link.dropped == dropped:
            self.report.faults[f"{kind} {whose}"] -= 1  # there was none to drop

    async def _break_worker(self, kind: str, number: int) -> None:
        process = self.workers[number]
        with self._fault(kind, blinds=process.pid):
            match kind:
                case "SIGSTOP":
                    with frozen(process.pid):
                        await asyncio.sleep(self._while())
                    return
                case "kill -9":
                    process.kill()
                case _:
                    process.send_signal(signal.SIGTERM)
                    if kind != "SIGTERM":
                        await asyncio.sleep(0.1)
                        process.send_signal(signal.SIGTERM)
            self.workers[number] = self._spawn(number)  # beside the old one, which may still finish
            await asyncio.to_thread(process.wait, 60)

    async def _break_server(self, kind: str) -> None:
        rng = self.rng
        with self._fault(f"{kind} of the server", blinds=0):
            match kind:
                case "standstill":
                    with stalled(self.server):
                        await asyncio.sleep(self._while())
                case "restart":
                    await asyncio.to_thread(restart, self.server, down=rng.uniform(0, 1.5 * LEASE))
                case _:
                    with full(self.port):
                        await asyncio.sleep(rng.uniform(0.1, 1))

    async def _break_keys(self, kind: str) -> None:
        """What a server may do by itself, or an operator by hand."""
        if "server" in self.busy:
            return
        with self._fault(kind), suppress(redis.RedisError), redis.Redis(port=self.port, socket_timeout=1) as raw:
            match kind:
                case "scripts forgotten":
                    raw.script_flush()
                case "doorbells lost":
                    raw.delete("{soak}:signal")
                case _:
                    raw.client_kill_filter(_type="normal", skipme=True)

    async def _break_gateway(self, kind: str) -> None:
        rng, switches = self.rng, self.switches
        times = rng.randint(1, 3)
        match kind:
            case "lost reply":
                rule = switches.drop_reply(executed=rng.random() < 0.7, times=times)
            case "late":
                rule = switches.delay(rng.uniform(0.05, 0.5), times=times)
            case "silence":
                rule = switches.silence(executed=rng.random() < 0.5)
            case "slow":
                rule = switches.trickle(0.001, times=times)
            case "nonsense":
                rule = switches.canned(rng.choice(("html_502", "cut_json", "cut_connection", "unavailable", "empty")))
            case _:
                refusal = rng.choice(("LOADING x", "READONLY x", "BUSY x", "NOSCRIPT x"))
                rule = switches.error(refusal, command="EVALSHA")
        with suppress(TimeoutError):
            await asyncio.to_thread(rule.wait, 1, 1.0)
            self.report.faults[f"{kind} at the gateway"] += 1

    # -- processes -----------------------------------------------------------------------------------------------------

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.soak.worker", self.links[number].url + "?socket_timeout=0.5"]
        command += [str(self.provider_port), str((0, 1, -1)[number % 3])]
        return subprocess.Popen(command, cwd=ROOT, stdout=self.log, stderr=self.log)

    def _kill_all(self) -> None:
        for process in self.workers:
            process.kill()
            process.wait()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _excused(self, pid: int, ended: int, at: int) -> bool:
        return any(
            who in (0, pid) and since <= at and until >= ended - 3000 * LEASE for who, since, until in self.blind
        )

    def _audit(self) -> None:
        report = self.report
        lives = read_history(read_aof(self.server.data_dir), "soak")
        with redis.Redis(port=self.port) as raw:
            accepted = self.told.keys() | {id for id in self.unsure if raw.exists(f"{{soak}}:job:{id}")}
            report.add(audit_keys(raw, "soak", accepted, at_rest=True))
            for told in self.told.values():
                record: Any = raw.hgetall(f"{{soak}}:job:{told.id}")
                report.wrong += _judge(told, {key.decode(): value.decode() for key, value in record.items()})
        report.add(audit_history(lives, accepted, at_rest=True))
        report.add(audit_calls(read_calls(self.folder / "calls"), lives, self._excused))
        report.jobs.update(summary(lives))
        log = (self.folder / "workers.log").read_text(errors="replace")
        report.jobs["outcomes refused for a lost lease"] = log.count("the lease is lost")
        report.wrong += [f"log: {line}" for line in log.splitlines() if any(odd in line for odd in ODD)]


def _judge(told: Told, record: dict[str, str]) -> Iterator[str]:
    """Whether a job ended as it should, and as everybody was told."""
    status = record.get("status")
    if status == "completed":
        text = json.loads(record["result"])
        if told.end == "fail" or text != text_of(int(text.partition(".")[0]), told.words):
            yield f"result: job {told.id!r} completed with {text!r}"
        if told.cancel == "yes":
            yield f"cancel: job {told.id!r} completed after cancel() said that it would not"
    elif status == "failed":
        if told.end != "fail":
            yield f"result: job {told.id!r} failed: {record.get('error')}"
        if told.cancel == "yes":
            yield f"cancel: job {told.id!r} failed after cancel() said that it was cancelled"
    elif status == "cancelled" and told.cancel not in ("yes", "unknown"):
        yield f"cancel: job {told.id!r} was cancelled, and its canceller was told {told.cancel!r}"
    if told.seen is not None:
        kind, body = told.seen
        kept = {"completed": lambda: json.loads(record["result"]), "failed": lambda: record["error"]}
        if kind != status or (kind in kept and kept[kind]() != body):
            yield f"watch: job {told.id!r} ended as {kind} for its watcher, and as {status} on its record"


async def _closed(server: asyncio.Server) -> None:
    server.close()
