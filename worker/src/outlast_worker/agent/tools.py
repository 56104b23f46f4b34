"""Tools: plain typed functions that a model may call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic wants these before Python 3.12)

from outlast.codec import _explain
from outlast.errors import InvalidArgumentError, OutlastError
from outlast_worker.steps import in_thread, is_coroutine_function

__all__ = ["Tool"]


class Tool:
    """A function with its name, its docstring as description, and the JSON schema of its parameters.

    It may be async; a plain one runs in a thread. What it returns becomes text: a str as it is, anything else as JSON.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", "")
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            raise InvalidArgumentError(f"a tool is a named function, not {function!r}")
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise InvalidArgumentError(f"tool {name}: its annotations cannot be read: {error}") from error
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise InvalidArgumentError(f"tool {name}: a model cannot give parameter {parameter}; give it a name")
            if parameter.name not in hints:
                raise InvalidArgumentError(f"tool {name}: parameter {parameter.name} has no type; annotate it")
            hint = hints[parameter.name]
            fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
        # A TypedDict, not a model: its fields may have any name, and defaults stay the function's own.
        arguments = cast("Any", TypedDict)(name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid")
        self.name = name
        self._function = function
        self._arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        schema = self._arguments.json_schema()
        schema.pop("title", None)
        self.definition = {
            "type": "function",
            "function": {"name": name, "description": inspect.getdoc(function) or name, "parameters": schema},
        }

    async def __call__(self, arguments: str) -> tuple[str, bool]:
        """The output of a call, or what was wrong with it and True. What a tool raises is for the model to read.

        Only the errors of outlast pass: RetryJobError, RateLimitedError and TerminalJobError decide about the job.
        """
        try:
            given = self._arguments.validate_json(arguments or "{}")
        except ValidationError as error:
            return _explain(error), True
        try:
            if is_coroutine_function(self._function):
                value = await self._function(**given)
            else:
                value = await in_thread(lambda: self._function(**given))
            return (value if isinstance(value, str) else to_json(value).decode()), False
        except OutlastError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}", True
