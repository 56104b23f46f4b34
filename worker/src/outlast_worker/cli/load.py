"""``MODULE:NAME`` → the object, imported from the current directory first."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Any

from outlast import ConfigurationError

__all__ = ["load"]


def load(target: str, what: str) -> Any:
    """The object that `target` names. ConfigurationError says where an import failed, without a traceback."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{target!r} does not name {what}; write MODULE:NAME, such as jobs:{what.split()[-1]}")
    here = os.getcwd()
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except ModuleNotFoundError as error:
        if error.name is not None and (module + ".").startswith(error.name + "."):
            hint = "; leave .py out" if module.endswith(".py") else ""
            raise ConfigurationError(f"no module {module!r} in {here} or among the installed packages{hint}") from None
        raise ConfigurationError(f"importing {module!r} failed: {error}{_where(error)}") from error
    except AttributeError as error:
        if module in sys.modules:
            raise ConfigurationError(f"module {module!r} has no {name!r}") from None
        raise ConfigurationError(f"importing {module!r} failed: {error}{_where(error)}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigurationError(
            f"importing {module!r} failed: {type(error).__name__}: {error}{_where(error)}"
        ) from error
    return value


def _where(error: BaseException) -> str:
    """The innermost line of the failed import that is not Python's own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if isinstance(error, SyntaxError) or len(frames) < 2:  # the first frame is ours
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
