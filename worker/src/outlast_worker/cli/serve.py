"""The commands that stay: dev, worker, dashboard, gateway."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from . import show
from .app import AsJson, Connect, RedisUrl, command, usage

__all__: list[str] = []

LogFormat = Literal["text", "json"]


@command
def dev(
    worker: Annotated[
        str | None, Argument(metavar="[MODULE:WORKER]", show_default=False, help="Your worker instead of the demo's.")
    ] = None,
    app: Annotated[
        str | None, Option(metavar="MODULE:APP", show_default=False, help="Your ASGI app instead of the demo's page.")
    ] = None,
    port: Annotated[
        int,
        Option(min=0, max=65_534, help="Of the page; the REST gateway is one above. 0: free ones, kept from then on."),
    ] = 8787,
    host: Annotated[str, Option(help="Where to listen. Anything but loopback is open to others.")] = "127.0.0.1",
    data_dir: Annotated[Path, Option(help="Where data, addresses and token are kept.")] = Path(".outlast"),
    as_json: AsJson = False,
) -> int:
    """Run everything here: database, gateway, worker, web front.

    Without arguments it is a demo, with a page and a small real model.
    """
    import asyncio

    from outlast_worker.dev.stack import Options, run

    if data_dir.resolve() == Path.cwd():  # it gets a .gitignore that ignores everything
        raise usage(f"--data-dir {str(data_dir)!r} is this folder; name one in it, such as .outlast")
    log_to_stderr("WARNING")
    return asyncio.run(run(Options(worker, app, host, port, data_dir, as_json)))


@command
def worker(
    target: Annotated[str, Argument(metavar="MODULE:WORKER", show_default=False, help="Imported from here.")],
    concurrency: Annotated[
        int | None,
        Option(min=1, max=100_000, show_default=False, help="Jobs at a time in one process; default as declared."),
    ] = None,
    processes: Annotated[
        int | None, Option(min=1, show_default=False, help="Processes to keep running; default one, not supervised.")
    ] = None,
    grace: Annotated[
        float | None,
        Option(min=0, metavar="SECONDS", show_default=False, help="Time for running jobs after a stop; default: all."),
    ] = None,
    burst: Annotated[
        bool, Option("--burst", help="End when no job is waiting or due; no wait for an endless pause.")
    ] = False,
    health: Annotated[
        str | None,
        Option(
            metavar="[HOST:]PORT",
            show_default=False,
            help="Answer /livez, /readyz, /metrics there; of --processes, each has the next port.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, Option(help="Of the log on stderr; json has a line for each entry, with job ids.")
    ] = "text",
    reload: Annotated[bool, Option("--reload", help="Restart when a Python file below here changes.")] = False,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
    parent_fd: Annotated[int | None, Option(hidden=True)] = None,
) -> int:
    """Run the jobs of MODULE:WORKER.

    SIGTERM or SIGINT: no new jobs, running ones finish. After --grace, or at a second signal, they are handed back
    to other workers, and the exit code is 1. A process that dies is started again (--processes, --reload).
    """
    log_to_stderr("INFO", log_format)
    if parent_fd is None and (processes is not None or reload):
        if burst and reload:
            raise usage("--burst ends and --reload never does; give one of them")
        options = [] if concurrency is None else ["--concurrency", str(concurrency)]
        # A handler that runs on would hold up the new source: with --reload it is handed back to it.
        grace = 5.0 if grace is None and reload else grace
        options += [] if grace is None else ["--grace", str(grace)]
        options += ["--burst"] if burst else []
        options += ["--log-format", log_format]
        return supervise(
            target, processes or 1, options, health=health, reload=reload, redis_url=redis_url, as_json=as_json
        )

    from outlast_worker import Worker

    from .load import load
    from .supervise import Lifeline

    lifeline = None if parent_fd is None else Lifeline(parent_fd)
    found = load(target, "a worker")
    if not isinstance(found, Worker):
        raise usage(f"{target} is {type(found).__name__}, not a Worker")
    url = redis_url or os.environ.get(URL_FROM_PARENT)
    if url:
        found.redis_url = url
    if concurrency is not None:
        found.concurrency = concurrency
    if grace is not None:
        found.grace = grace
    if health is not None:
        found.health = health
    if as_json and parent_fd is None:
        show.dump({"pid": os.getpid(), "worker": target, "processes": 1})
    if lifeline is not None:
        lifeline.ready()
    found.run(burst=burst)
    return 0


URL_FROM_PARENT = "OUTLAST_WORKER_REDIS_URL"
"""How --redis-url reaches child processes: a command line can be read by everybody on the machine."""


def supervise(
    target: str,
    processes: int,
    options: list[str],
    *,
    health: str | None,
    reload: bool,
    redis_url: str | None,
    as_json: bool,
) -> int:
    import asyncio

    from outlast_worker.health import parse_address

    from .supervise import Program, Supervisor, on_signals

    def told(n: int) -> list[str]:
        if health is None:
            return []
        host, port = parse_address(health)
        return ["--health", f"{host}:{port + n if port else 0}"]

    async def run() -> int:
        base = [sys.executable, "-m", "outlast_worker", "worker", target, *options, "--parent-fd", "{fd}"]
        env = {**os.environ, URL_FROM_PARENT: redis_url} if redis_url else None
        programs = [Program(f"worker process {n + 1}", [*base, *told(n)], env=env) for n in range(processes)]
        supervisor = Supervisor(programs, until_done="--burst" in options, reload=Path.cwd() if reload else None)
        with on_signals(supervisor.stop):
            if as_json:
                show.dump({"pid": os.getpid(), "worker": target, "processes": processes})
            return await supervisor.run()

    return asyncio.run(run())


@command
def dashboard(
    queue: Annotated[
        list[str] | None,
        Argument(metavar="[QUEUE]...", show_default=False, help="Only these; default: all that are there now."),
    ] = None,
    port: Annotated[int, Option(min=0, max=65_535, help="0 takes a free one.")] = 8789,
    host: Annotated[str, Option(help="Where to listen. Anything but loopback is open to others.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        Option(show_default=False, help="What opens it; default OUTLAST_DASHBOARD_TOKEN, or a new one."),
    ] = None,
    payloads: Annotated[bool, Option("--payloads", help="Show payloads, results and the words of the output.")] = False,
    *,
    connect: Connect,
    as_json: AsJson = False,
) -> int:
    """Queues, workers and jobs as a web page, until a signal comes.

    The address that it prints has the token in it. Without names it looks for queues once, by a walk over all keys.
    """
    import asyncio
    import secrets

    from outlast import ConfigurationError, Queue

    from .connect import queue_names

    try:
        from outlast_worker.dashboard import serve
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"outlast dashboard needs {error.name}: pip install 'outlast-worker[dev]' has all of it"
        ) from error

    with connect() as client:
        names = queue or queue_names(client)
        address = client._find_address()
    if not names:
        raise usage("no queues in this database yet; name those to show: outlast dashboard QUEUE")
    log_to_stderr("WARNING")
    return asyncio.run(
        serve(
            address,
            [Queue(name) for name in dict.fromkeys(names)],
            host,
            port,
            token or os.environ.get("OUTLAST_DASHBOARD_TOKEN") or secrets.token_urlsafe(24),
            payloads=payloads,
            as_json=as_json,
        )
    )


@command
def gateway(
    redis_url: RedisUrl = None,
    port: Annotated[int, Option(min=0, max=65_535, help="0 takes a free one.")] = 8079,
    host: Annotated[str, Option(help="Where to listen. Anything but loopback is open to others.")] = "127.0.0.1",
    token: Annotated[
        str | None, Option(show_default=False, help="What callers must send; default OUTLAST_REST_TOKEN, or a new one.")
    ] = None,
    readonly_token: Annotated[str | None, Option(show_default=False, help="One more, which may only read.")] = None,
    config_file: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="FILE",
            show_default=False,
            help="TOML: several [[databases]] with redis_url and token, and the gateway's other settings.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, Option(show_default=False, help="A Host header that is answered, for a bind elsewhere.")
    ] = None,
    allow_admin: Annotated[bool, Option("--allow-admin", help="Pass on CONFIG, DEBUG and the like.")] = False,
    access_log: Annotated[bool, Option("--access-log", help="Log commands, without keys and values.")] = False,
    billed: Annotated[
        bool, Option("--billed", help="Count billed commands: a header, and the total at /-/billed.")
    ] = False,
    faults: Annotated[
        bool, Option("--faults", help="Test switches at /-/faults: lose replies, delay, refuse.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """An Upstash-compatible REST front for your own Redis."""
    import asyncio
    import logging
    import secrets

    from outlast import ConfigurationError
    from outlast_worker.gateway import Database, Faults, GatewayConfig
    from outlast_worker.gateway.config import is_loopback

    from .connect import redis_url_or_environment

    log_to_stderr("WARNING")
    local = is_loopback(host)
    settings: dict[str, Any] = {"allow_remote": not local}
    if allowed_host or (config_file is None and not local):
        settings["allowed_hosts"] = allowed_host or ["*"]
    settings |= {
        name: value
        for name, value in {
            "allow_admin": allow_admin,
            "access_log": access_log,
            "count_billed": billed,
            "faults": Faults() if faults else None,
        }.items()
        if value
    }
    if config_file is not None:
        if redis_url or token or readonly_token:
            raise usage("--config names databases and tokens itself; leave --redis-url and the tokens out")
        try:
            config = GatewayConfig.load(config_file, **settings)
        except (OSError, ValueError) as error:
            raise usage(f"--config {config_file}: {error}") from error
    else:
        url = redis_url_or_environment(redis_url)
        if url is None:
            raise ConfigurationError("no database: give --redis-url or --config, or set OUTLAST_REDIS_URL")
        token = token or os.environ.get("OUTLAST_REST_TOKEN") or secrets.token_urlsafe(24)
        config = GatewayConfig(
            databases=[Database(redis_url=url, token=token, readonly_token=readonly_token)], **settings
        )
    if access_log:
        logging.getLogger("outlast").setLevel("INFO")
    return asyncio.run(serve_gateway(config, host, port, as_json=as_json))


async def serve_gateway(config: Any, host: str, port: int, *, as_json: bool) -> int:
    import asyncio
    from shlex import quote

    from outlast_worker.gateway import GatewayServer

    from .supervise import on_signals

    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            os._exit(130)  # asked twice: do not wait for the requests in progress
        stopped.set()

    with on_signals(stop):
        async with GatewayServer(config, host, port) as server:
            token = config.databases[0].token
            if as_json:
                show.dump({"rest_url": server.url, "rest_token": token})
            else:
                show.put(f"export OUTLAST_REST_URL={server.url}\nexport OUTLAST_REST_TOKEN={quote(token)}")
            await stopped.wait()
    return 0


def log_to_stderr(level: str, form: LogFormat = "text") -> None:
    """For the processes that stay. Libraries that log addresses or requests stay silent below a warning."""
    import logging

    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        from outlast_worker.logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("outlast").setLevel(level)
