"""What a data directory remembers: ports, password, token. So addresses and secrets stay the same over restarts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from outlast import ConfigurationError

__all__ = ["State"]

T = TypeVar("T", str, int)


class State:
    """The file ``state.json`` in `data_dir`, readable by its owner only. Makes the directory."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        self.dir = Path(data_dir).resolve()
        self.path = self.dir / "state.json"
        try:
            self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            ignore = self.dir / ".gitignore"
            if not ignore.exists():  # it holds secrets and prompts: keep it out of commits
                ignore.write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"data_dir={str(data_dir)!r} cannot be used: {error.strerror}") from error

    def read(self) -> dict[str, Any]:
        try:
            value: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise ConfigurationError(f"{self.path} cannot be read ({reason}); delete it to start afresh") from None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    def get(self, name: str, kind: type[T]) -> T | None:
        value = self.read().get(name)
        return value if isinstance(value, kind) else None

    def put(self, **values: str | int) -> None:
        """Remember `values`, whole or not at all."""
        draft = self.path.with_name(f".state.{os.getpid()}")
        content = json.dumps({**self.read(), **values}, indent=1) + "\n"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(draft, self.path)

    def remember(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """The remembered value, or a new one that is remembered from now on."""
        value = self.get(name, kind)
        if value is None:
            value = make()
            self.put(**{name: value})
        return value
