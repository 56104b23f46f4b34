"""The commands of producers, watchers and operators: they talk to the database and end.

What is heavy is imported by the command that needs it, so that `outlast --help` loads none of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from outlast.listing import JobState

from . import show
from .app import NO, TIMEOUT, AsJson, Connect, command, usage

if TYPE_CHECKING:
    from outlast import Client, Event, Jobs
    from outlast.protocol import Call

__all__: list[str] = []

QueueName = Annotated[str, Argument(metavar="QUEUE", show_default=False, help="The queue's name.")]
JobId = Annotated[
    str, Argument(metavar="ID", show_default=False, help="The job's id. One that starts with a dash goes after --.")
]


def jobs_of(client: Client, queue: str) -> Jobs[Any, Any]:
    from outlast import Queue

    return client.queue(Queue(queue))


# -- producing and watching --------------------------------------------------------------------------------------------


@command
def enqueue(
    queue: QueueName,
    payload: Annotated[
        str | None, Argument(metavar="JSON", show_default=False, help="The payload, or - to read it from stdin.")
    ] = None,
    payload_file: Annotated[
        Path | None, Option(metavar="FILE", exists=True, dir_okay=False, help="Read the payload from a file.")
    ] = None,
    id: Annotated[str | None, Option(help="An id of your own; write --id=-x for one that starts with a dash.")] = None,
    delay: Annotated[float, Option(metavar="SECONDS", help="Not before this time has passed.")] = 0.0,
    priority: Annotated[int, Option(help="0 to 9; 9 goes first.")] = 0,
    max_attempts: Annotated[int | None, Option(help="Attempts before the job is dead; default 3.")] = None,
    idempotency_key: Annotated[str | None, Option(metavar="KEY", help="The same key gives the same job.")] = None,
    webhook: Annotated[
        str | None, Option(metavar="URL", show_default=False, help="An https URL that is told of the end.")
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Then print its output as it comes.")] = False,
    wait: Annotated[bool, Option("--wait", help="Then wait for its result and print it.")] = False,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Make a job and print its id."""
    if watch and wait:
        raise usage("--watch and --wait exclude each other; give one of them")
    value = read_payload(payload, payload_file)
    with connect() as client:
        jobs = jobs_of(client, queue)
        made = jobs.enqueue(
            value,
            id=id,
            delay=delay,
            priority=priority,
            max_attempts=max_attempts,
            idempotency_key=idempotency_key,
            webhook=webhook,
        )
        facts = {"id": made.id, "deduplicated": made.deduplicated}
        if not watch and not wait:
            if as_json:
                show.dump(facts)
            else:
                show.put(made.id)
                if made.deduplicated:
                    show.note("no new job: the idempotency key is that of this one")
            return 0
        if not as_json:
            show.note(f"job {made.id}" + (" (no new one: its idempotency key)" if made.deduplicated else ""))
        elif watch:
            show.dump({"id": made.id, "type": "enqueued", "deduplicated": made.deduplicated})
        if watch:
            return follow(jobs.watch(made.id), queue, made.id, as_json=as_json)
        return result(jobs, made.id, timeout=None, as_json=as_json, facts=facts)


def read_payload(text: str | None, file: Path | None) -> Any:
    if (text is None) == (file is None):
        raise usage("give the payload once: as JSON, with --payload-file, or as - to read it from stdin")
    if file is not None:
        what, raw = f"the payload in {file}", file.read_bytes()
    elif text == "-":
        what, raw = "the payload on stdin", sys.stdin.buffer.read()
    else:
        assert text is not None
        what, raw = "the payload", text.encode("utf-8", "surrogateescape")
    try:
        return json.loads(raw)
    except UnicodeDecodeError:
        raise usage(f"{what} is not UTF-8") from None
    except json.JSONDecodeError as error:
        hint = "" if raw.strip()[:1] in (b"{", b"[", b'"') else """ (text needs quotes of its own: '"text"')"""
        raise usage(f"{what} is not JSON: {error.msg} at line {error.lineno} column {error.colno}{hint}") from None
    except RecursionError:
        raise usage(f"{what} is nested too deep") from None


def follow(events: Iterable[Event[Any]], queue: str, id: str, *, as_json: bool) -> int:
    """Print events until the end."""
    if not as_json:
        return outcome(show.stream(events, queue, id, text=True), id)
    for event in events:
        show.dump(show.event_json(event))
        if event.type in ("completed", "failed", "cancelled"):
            return 0 if event.type == "completed" else NO
    return outcome(None, id, as_json=True)


def result(jobs: Jobs[Any, Any], id: str, *, timeout: float | None, as_json: bool, facts: dict[str, Any]) -> int:
    """Print the result once it is there, as one JSON object if asked."""
    events = jobs.watch(id, after="latest", timeout=timeout)
    if not as_json:
        # What the job has said of its progress so far is on its record only.
        job = jobs.get(id) if show.on_terminal() else None
        progress = 0.0 if job is None else job.progress
        return outcome(show.stream(events, jobs.queue.name, id, text=False, progress=progress), id)
    end = next((event for event in events if event.type in ("completed", "failed", "cancelled")), None)
    if end is None:
        return outcome(None, id, as_json=True)
    told = {key: value for key, value in show.event_json(end).items() if key in ("attempt", "result", "error")}
    show.dump({**facts, "status": end.type, **told})
    return 0 if end.type == "completed" else NO


def outcome(end: show.Ended | None, id: str, *, as_json: bool = False) -> int:
    """The exit code of an end, and for people what kind of end it was."""
    if end is None:
        show.fail("TimeoutError", f"job {id} has not ended in this time; it goes on", TIMEOUT, as_json=as_json)
    if end.type == "completed":
        return 0
    show.note(f"job {id} failed: {end.error}" if end.type == "failed" else f"job {id} was cancelled")
    return NO


@command
def get(
    queue: QueueName,
    id: JobId,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Print a job's record."""
    from outlast import JobNotFoundError

    with connect() as client:
        job = jobs_of(client, queue).get(id)
    if job is None:
        raise JobNotFoundError(f"no job {id!r} in queue {queue!r}: unknown, or expired", id)
    facts = show.job_json(job, queue)
    show.dump(facts) if as_json else show.pairs(facts)
    return 0


@command
def watch(
    queue: QueueName,
    id: JobId,
    after: Annotated[
        str | None, Option(metavar="CURSOR", show_default=False, help="Resume after this event's id; or `latest`.")
    ] = None,
    timeout: Annotated[
        float | None, Option(metavar="SECONDS", show_default=False, help="Stop after this time.")
    ] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Print a job's output as it comes, until the job ends. With --json one event a line."""
    with connect() as client:
        events = jobs_of(client, queue).watch(id, after=after, timeout=timeout)
        return follow(events, queue, id, as_json=as_json)


@command
def wait(
    queue: QueueName,
    id: JobId,
    timeout: Annotated[float | None, Option(metavar="SECONDS", show_default=False, help="Wait no longer.")] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Wait for a job's end and print its result."""
    with connect() as client:
        return result(jobs_of(client, queue), id, timeout=timeout, as_json=as_json, facts={"id": id})


@command
def cancel(
    queue: QueueName,
    id: JobId,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Stop a job, whether it waits or runs."""
    with connect() as client:
        done = jobs_of(client, queue).cancel(id)
    if as_json:
        show.dump({"id": id, "cancelled": done})
    elif done:
        show.put(f"{id} cancelled")
    else:
        show.note(f"job {id} was not cancelled: it has ended already, or is unknown")
    return 0 if done else NO


# -- operating ---------------------------------------------------------------------------------------------------------


def jobs(
    queue: QueueName,
    state: Annotated[JobState, Option(help="Completed and cancelled jobs are in no list: get them by id.")] = "waiting",
    limit: Annotated[int, Option(help="At most this many, 1 to 100.")] = 50,
    cursor: Annotated[
        str | None, Option(metavar="CURSOR", show_default=False, help="Go on where the page before ended.")
    ] = None,
    reverse: Annotated[bool, Option("--reverse", help="From the other end: the latest first.")] = False,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """List the jobs of a state, page by page."""
    with connect() as client:
        page = jobs_of(client, queue).by_state(state, limit=limit, cursor=cursor, reverse=reverse)
    if as_json:
        found = [
            {**show.info_json(job, queue), "due_at": show.when(job.due_at), "worker": job.worker} for job in page.jobs
        ]
        show.dump({"queue": queue, "state": state, "jobs": found, "next": page.next})
        return 0
    if page.jobs:
        rows = [
            (
                job.id,
                job.priority,
                f"{job.attempt}/{job.max_attempts}",
                show.when(job.due_at or job.finished_at or job.started_at or job.created_at) or "",
                job.owner or "",
                one_line(job.error or ""),
            )
            for job in page.jobs
        ]
        since = {"waiting": "SINCE", "scheduled": "DUE", "active": "STARTED", "dead": "DIED"}[state]
        show.table(("ID", "PRIORITY", "ATTEMPT", since, "OWNER", "ERROR"), rows)
    elif page.next is None:
        show.note(f"no {state} jobs in queue {queue}" + (" behind the cursor" if cursor is not None else ""))
    if page.next is not None:
        show.note(f"there are more: --cursor {page.next}")
    return 0


command(jobs)


@command
def dead(
    queue: QueueName,
    count: Annotated[int, Option(help="List at most this many, oldest first.")] = 50,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """List the jobs that failed for good."""
    with connect() as client:
        jobs = jobs_of(client, queue)
        records = [jobs._get(id) for id in jobs.dead(count)]
        found = [show.job_json(job, queue) for job in send_all(client, records) if job is not None]
    if as_json:
        show.dump({"queue": queue, "jobs": found})
    elif found:
        rows = [(job["id"], job["finished_at"] or "", job["attempt"], one_line(job["error"] or "")) for job in found]
        show.table(("ID", "DIED", "ATTEMPTS", "ERROR"), rows)
    else:
        show.note(f"no dead jobs in queue {queue}")
    return 0


def send_all(client: Client, sent: Sequence[Call[Any]]) -> list[Any]:
    """The answers of many calls, in pipelines of a size that any server takes."""
    return [answer for at in range(0, len(sent), 100) for answer in client._transport.send_many(sent[at : at + 100])]


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:99] + "…"


@command
def retry_dead(
    queue: QueueName,
    id: Annotated[str | None, Argument(metavar="ID", show_default=False, help="The job's id.")] = None,
    all: Annotated[bool, Option("--all", help="Every job that is dead now.")] = False,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Put dead jobs back to work, with a fresh count of attempts."""
    if all == (id is not None):
        raise usage("give the ID of one job, or --all")
    with connect() as client:
        jobs = jobs_of(client, queue)
        if id is not None:
            done = jobs.retry_dead(id)
            if as_json:
                show.dump({"id": id, "retried": done})
            elif done:
                show.put(f"{id} waiting")
            else:
                show.note(f"job {id} is not dead")
            return 0 if done else NO
        retried: dict[str, None] = {}
        while True:
            # Those that were retried have left the list; one that died again meanwhile must not go round for ever.
            page = [id for id in jobs.dead(1000) if id not in retried]
            answers = send_all(client, [jobs._retry_dead(id, None) for id in page])
            done_now = [id for id, done in zip(page, answers, strict=True) if done]
            retried.update(dict.fromkeys(done_now))
            if not done_now:
                break
    if as_json:
        show.dump({"queue": queue, "retried": [*retried]})
    else:
        for id in retried:
            show.put(f"{id} waiting")
        show.note(f"{len(retried)} put back")
    return 0


@command
def stats(
    queue: Annotated[str | None, Argument(metavar="[QUEUE]", show_default=False, help="Only this queue.")] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Count jobs and workers of one queue, or of all."""
    from .connect import live_workers, queue_names

    with connect() as client:
        found: list[dict[str, Any]] = []
        for name in [queue] if queue is not None else queue_names(client):
            counts = jobs_of(client, name).stats()
            workers = len(live_workers(client, name))
            found.append(
                {
                    "queue": name,
                    "waiting": counts.waiting,
                    "scheduled": counts.scheduled,
                    "active": counts.active,
                    "dead": counts.dead,
                    "oldest_waiting": counts.oldest_waiting,
                    "workers": workers,
                    "unattended": counts.waiting > 0 and workers == 0,
                }
            )
    if as_json:
        show.dump({"queues": found} if queue is None else found[0])
    elif found:
        rows = [
            (
                row["queue"],
                row["waiting"],
                "" if row["oldest_waiting"] is None else age(row["oldest_waiting"]),
                row["scheduled"],
                row["active"],
                row["dead"],
                row["workers"],
            )
            for row in found
        ]
        show.table(("QUEUE", "WAITING", "SINCE", "SCHEDULED", "ACTIVE", "DEAD", "WORKERS"), rows)
        for row in found:
            if row["unattended"]:
                show.note(f"queue {row['queue']} has waiting jobs and no worker")
    else:
        show.note("no queues in this database")
    return 0


@command
def workers(
    queue: Annotated[
        list[str] | None, Argument(metavar="[QUEUE]...", show_default=False, help="Only of these queues.")
    ] = None,
    host: Annotated[
        str | None,
        Option(metavar="HOST", show_default=False, help="Only those on this host; exit code 1 if none is well."),
    ] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """List the live workers."""
    from .connect import live_workers, queue_names

    found: dict[str, dict[str, Any]] = {}
    with connect() as client:
        for name in queue or queue_names(client):
            for id, info in live_workers(client, name).items():
                if host is None or info.get("host") == host:
                    found.setdefault(id, {"id": id, **info, "queues": []})["queues"].append(name)
    listed = sorted(found.values(), key=lambda info: (str(info.get("host")), info.get("pid") or 0))
    if as_json:
        show.dump({"workers": listed})
    elif listed:
        rows = [
            (
                info.get("host"),
                info.get("pid"),
                ",".join(info["queues"]),
                f"{info.get('active')}/{info.get('concurrency')}",
                info.get("state"),
                f"{age(info['seen'])} ago",
                info.get("version"),
            )
            for info in listed
        ]
        show.table(("HOST", "PID", "QUEUES", "BUSY", "STATE", "SEEN", "VERSION"), rows)
    else:
        show.note("no live workers" + (f" on host {host}" if host is not None else ""))
    well = [info for info in listed if info.get("state") != "blocked"]
    return NO if host is not None and not well else 0


def age(seconds: float) -> str:
    """12s, 3m 20s, 5h 01m, 2d 03h."""
    whole = int(seconds)
    for unit, name, lesser, lesser_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name} {whole % unit // lesser:02}{lesser_name}"
    return f"{whole}s"
