"""The application, the options that commands share, and how their errors are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter, signature
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from . import show

if TYPE_CHECKING:
    from outlast import Client

    Connect = Callable[[], Client]
else:
    Connect = Any

__all__ = [
    "DATABASE",
    "INTERRUPTED",
    "NO",
    "TIMEOUT",
    "USAGE",
    "AsJson",
    "Connect",
    "RedisUrl",
    "app",
    "command",
    "main",
    "usage",
]

NO, USAGE, DATABASE, TIMEOUT, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    name="outlast",
    help="A job queue for slow, streaming model calls.",
    epilog="Exit codes: 0 done; 1 the answer is no (failed, cancelled, not found, taken); 2 wrong arguments; "
    "3 the database did not answer or refused; 4 time is up; 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,  # theirs show local variables: prompts and passwords
    context_settings={"help_option_names": ["-h", "--help"]},
)

RedisUrl = Annotated[
    str | None,
    Option(
        "--redis-url", show_default=False, help="redis://, rediss://, unix://; default OUTLAST_REDIS_URL, REDIS_URL."
    ),
]
RestUrl = Annotated[
    str | None,
    Option("--rest-url", show_default=False, help="An Upstash REST address; default OUTLAST_REST_URL and so on."),
]
RestToken = Annotated[str | None, Option("--rest-token", show_default=False, help="Its token.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]

_DATABASE = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option)
    for name, option in (("redis_url", RedisUrl), ("rest_url", RestUrl), ("rest_token", RestToken))
]


def _versions(wanted: bool) -> None:
    if wanted:
        from outlast.__main__ import main

        raise typer.Exit(main())


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_versions, is_eager=True, help="What is installed.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of `outlast`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    app(prog_name="outlast")


def command(function: Callable[..., int | None], *, on: typer.Typer = app, name: str | None = None) -> None:
    """Register a command. Its errors become one line on stderr and an exit code; tracebacks are for bugs.

    One with a parameter `connect` has the options that name a database in its place, and gets what opens it.
    """
    declared = signature(function, eval_str=True)
    connects = "connect" in declared.parameters
    shown = [
        one
        for parameter in declared.parameters.values()
        for one in (_DATABASE if parameter.name == "connect" else [parameter])
    ]

    @wraps(function)
    def run(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
        from outlast import InvalidArgumentError, OutlastError
        from outlast.errors import ConfigurationError, JobError

        try:
            for name in (option.name for option in _DATABASE):
                # A script's variable that is not set must not lead to the environment's database.
                if arguments.get(name) is not None and not arguments[name].strip():
                    raise usage(f"--{name.replace('_', '-')} is empty; give a value, or leave it out")
            if connects:
                from .connect import connect

                arguments["connect"] = partial(connect, *(arguments.pop(option.name) for option in _DATABASE))
            code = function(**arguments)
        except OutlastError as error:
            ours = isinstance(error, (InvalidArgumentError, ConfigurationError))
            code = USAGE if ours else NO if isinstance(error, JobError) else DATABASE
            show.fail(type(error).__name__, str(error), code, as_json=as_json)
        except KeyboardInterrupt:
            code = INTERRUPTED
        raise typer.Exit(code or 0)

    run.__signature__ = declared.replace(parameters=shown)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    on.command(name or function.__name__.replace("_", "-"))(run)


def usage(message: str) -> Exception:
    from outlast import InvalidArgumentError

    return InvalidArgumentError(message)
