"""``outlast queue …``: the rules of a queue, in the database, and emptying it."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from outlast.listing import JobState
from outlast.protocol import Call, Keys, calls
from outlast.protocol.wire import table

from . import show
from .app import NO, AsJson, Connect, app, command, usage
from .jobs import QueueName, jobs_of

if TYPE_CHECKING:
    from outlast import Rules
    from outlast.rules import RuleChanges

__all__: list[str] = []

queues = typer.Typer(
    help="Show, set and pause queues.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(queues, name="queue")


def set_(
    queue: QueueName,
    concurrency: Annotated[
        str | None,
        Option(metavar="N", show_default=False, help="The most jobs that run at any moment, on all workers together."),
    ] = None,
    rate: Annotated[
        str | None,
        Option(metavar="N/TIME", show_default=False, help="The most starts in any such time: 30/60s, 10/s, 1000/h."),
    ] = None,
    burst: Annotated[
        str | None,
        Option(
            metavar="N",
            show_default=False,
            help="Starts that may come at once after a quiet time; default 1, evenly spaced.",
        ),
    ] = None,
    owner_cap: Annotated[
        str | None, Option(metavar="N", show_default=False, help="The most jobs of one owner that run at any moment.")
    ] = None,
    lease: Annotated[
        str | None, Option(metavar="SECONDS", show_default=False, help="How long a silent worker owns a job.")
    ] = None,
    timeout: Annotated[
        str | None, Option(metavar="SECONDS", show_default=False, help="The longest that one attempt may run.")
    ] = None,
    max_attempts: Annotated[
        str | None,
        Option(metavar="N", show_default=False, help="For jobs that were enqueued without a number of their own."),
    ] = None,
    max_payload: Annotated[
        str | None, Option(metavar="BYTES", show_default=False, help="The largest payload, as JSON; at least 16384.")
    ] = None,
    result_ttl: Annotated[
        str | None, Option(metavar="SECONDS", show_default=False, help="How long finished jobs are kept.")
    ] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Set rules, or just set the queue up. `none` removes a rule; what is not named stays."""
    given = {
        "concurrency": _number(concurrency, "--concurrency", int),
        "rate": rate,
        "burst": _number(burst, "--burst", int),
        "owner_cap": _number(owner_cap, "--owner-cap", int),
        "lease": _number(lease, "--lease", float),
        "timeout": _number(timeout, "--timeout", float),
        "max_attempts": _number(max_attempts, "--max-attempts", int),
        "max_payload": _number(max_payload, "--max-payload", int),
        "result_ttl": _number(result_ttl, "--result-ttl", float),
    }
    changes = {name: None if value == "none" else value for name, value in given.items() if value is not None}
    with connect() as client:
        jobs = jobs_of(client, queue)
        jobs.set_rules(**cast("RuleChanges", changes))
        _show(queue, jobs.rules(), as_json=as_json)
    return 0


def _number(text: str | None, option: str, kind: type[int] | type[float]) -> Any:
    if text is None or text == "none":
        return text
    try:
        return kind(text)
    except ValueError:
        raise usage(f"{option} {text!r} is no number; give one, or none to remove the rule") from None


def show_(
    queue: QueueName,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Show a queue's rules, its pause, and what its jobs used today."""
    with connect() as client:
        jobs = jobs_of(client, queue)
        used = [*jobs.usage(days=1).values(), {}]
        _show(queue, jobs.rules(), used=used[0], as_json=as_json)
    return 0


def _show(queue: str, rules: Rules, *, as_json: bool, used: dict[str, float] | None = None) -> None:
    from dataclasses import asdict

    facts: dict[str, Any] = {"queue": queue}
    for name, value in asdict(rules).items():
        facts[name] = value.isoformat(timespec="milliseconds") if name.endswith(("_at", "_until")) and value else value
    if used is not None:
        facts["used_today"] = used
    if as_json:
        show.dump(facts)
        return
    show.pairs({name: value for name, value in facts.items() if value not in (False, {})})
    if rules.set_at is None:
        show.note(f"queue {queue} was never set up; outlast queue set {queue} does")


def pause(
    queue: QueueName,
    duration: Annotated[
        float | None, Option("--for", metavar="SECONDS", show_default=False, help="Default: until it is resumed.")
    ] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Let workers take no more jobs of a queue. What runs goes on; a pause never shortens one that is set."""
    with connect() as client:
        jobs = jobs_of(client, queue)
        jobs.pause(duration)
        _show(queue, jobs.rules(), as_json=as_json)
    return 0


def resume(
    queue: QueueName,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """End every pause of a queue, those that providers asked for too."""
    with connect() as client:
        jobs = jobs_of(client, queue)
        jobs.resume()
        _show(queue, jobs.rules(), as_json=as_json)
    return 0


def purge(
    queue: QueueName,
    state: Annotated[JobState, Option(show_default=False, help="waiting and scheduled are cancelled, dead forgotten.")],
    older_than: Annotated[float, Option(metavar="SECONDS", help="Only what was made, or died, so long ago.")] = 0.0,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Empty a state of a queue, in batches; what runs goes on."""
    if not yes:
        if not sys.stdin.isatty():
            raise usage("give --yes: there is nobody to ask whether the jobs may go")
        typer.confirm(f"Purge the {state} jobs of queue {queue}?", abort=True, err=True)
    with connect() as client:
        count = jobs_of(client, queue).purge(state, older_than=older_than)
    show.dump({"queue": queue, "state": state, "purged": count}) if as_json else show.put(f"{count} purged")
    return 0


def schedules(
    queue: Annotated[str | None, Argument(metavar="[QUEUE]", show_default=False, help="Only of this queue.")] = None,
    forget: Annotated[
        str | None, Option(metavar="NAME", show_default=False, help="Drop a schedule that no worker has any more.")
    ] = None,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """List the schedules that workers have declared."""
    from ..schedules import rule_of, runs
    from .connect import queue_names

    if forget is not None and queue is None:
        raise usage("--forget needs the QUEUE of the schedule")
    found: list[dict[str, Any]] = []
    with connect() as client:
        names = [queue] if queue is not None else queue_names(client)
        keys = [Keys(client._prefix + name).schedules for name in names]
        if forget is not None:
            gone = client._transport.send(Call(("HDEL", keys[0], f"last:{forget}", f"spec:{forget}"), int))
            show.dump({"queue": queue, "name": forget, "forgotten": gone > 0}) if as_json else show.put(
                f"{forget} forgotten" if gone else f"no schedule {forget}"
            )
            return 0 if gone else NO
        clock, *tables = client._transport.send_many([calls.CLOCK, *(Call(("HGETALL", key), table) for key in keys)])
    now = datetime.fromtimestamp(clock / 1000, UTC)
    for name, fields in zip(names, tables, strict=True):
        for field, rule in sorted(fields.items()):
            if field.startswith("spec:"):
                last = datetime.fromtimestamp(int(fields.get(f"last:{field[5:]}", "0")) / 1000, UTC)
                when, timezone = rule_of(rule)
                following = next(iter(runs(rule, now)), None)
                due = next(iter(runs(rule, last)), now)
                found.append(
                    {
                        "queue": name,
                        "name": field[5:],
                        "rule": when,
                        "timezone": timezone,
                        "last": show.when(last),
                        "next": show.when(following),
                        "overdue": due < now - timedelta(minutes=5),
                    }
                )
    if as_json:
        show.dump({"schedules": found})
    elif found:
        show.table(
            ("QUEUE", "NAME", "RULE", "TIMEZONE", "NEXT"),
            [tuple(one[key] or "" for key in ("queue", "name", "rule", "timezone", "next")) for one in found],
        )
        for one in found:
            if one["overdue"]:
                show.note(f"schedule {one['name']} of queue {one['queue']} is overdue: does a worker still have it?")
    else:
        show.note("no schedules")
    return 0


command(schedules)
command(set_, on=queues, name="set")
command(show_, on=queues, name="show")
command(pause, on=queues)
command(resume, on=queues)
command(purge, on=queues)
