"""How payloads and results become text.

The wire has JSON text as JSON.stringify writes it: compact, non-ASCII characters raw, no NaN or Infinity. Any JSON
text is read, whoever wrote it. pydantic is imported only when a queue is declared with a type that needs it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from ._checks import is_dict
from .errors import InvalidArgumentError, ReplyShapeError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

__all__ = ["Codec", "JsonCodec", "PlainCodec", "TypedCodec", "codec_for"]

T = TypeVar("T")

MAX_DEPTH = 500
"""Deepest nesting that is written. Other readers of the queue have limits of their own (Node's is some thousands)."""


class Codec(Protocol[T]):
    """Turns a value into the text that is stored, and back.

    Both directions raise ValueError or TypeError for what they cannot do; the text of such an error may reach a
    job's record, so it must not quote the value.
    """

    def encode(self, value: T, /) -> str: ...

    def decode(self, text: str, /) -> T: ...


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def dump_json(value: Any) -> str:
    """`value` as compact JSON text. Raises InvalidArgumentError for what JSON cannot hold, without quoting it."""
    _check(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(_why_not_json(error)) from None


def _why_not_json(error: BaseException) -> str:
    if isinstance(error, TypeError):
        return f"not JSON: {error}"  # "Object of type X is not JSON serializable": names the type only
    if isinstance(error, RecursionError) or "ircular" in str(error):
        return f"nested deeper than {MAX_DEPTH} levels, or contains itself"
    if "integer string conversion" in str(error):
        return "has an integer of more digits than Python writes as text; pass it as text of your own"
    return "contains NaN or Infinity, which JSON cannot hold"


def _check(value: Any) -> None:
    """Refuse what json.dumps would silently change (int keys become text) or what no reader could decode."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            if not item.isascii():
                _check_text(item)
        elif is_dict(item):
            if depth > MAX_DEPTH:
                raise InvalidArgumentError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise InvalidArgumentError(f"a dict key is {type(key).__name__}; JSON keys are text: use str keys")
                if not key.isascii():
                    _check_text(key)
                stack.append((inner, depth + 1))
        elif isinstance(item, (list, tuple)):
            if depth > MAX_DEPTH:
                raise InvalidArgumentError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
            stack.extend((inner, depth + 1) for inner in cast("list[Any]", item))


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"text has half a surrogate pair at position {error.start}; UTF-8 cannot hold it: join or replace it"
        ) from None


class JsonCodec:
    """Plain JSON: dict, list, str, int, float, bool, None. Numbers keep their exact value."""

    def encode(self, value: Any) -> str:
        return dump_json(value)

    def decode(self, text: str) -> Any:
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            # The error's own str() has no text of the document; its .doc does, so the chain ends here.
            raise ReplyShapeError(f"not JSON: {error.msg} at character {error.pos}") from None
        except RecursionError:
            raise ReplyShapeError("not JSON that can be read here: nested too deep") from None
        except ValueError as error:
            raise ReplyShapeError(f"not JSON: {error}") from None


class PlainCodec(JsonCodec):
    """JSON of one built-in type, checked by isinstance: what needs no pydantic should not load it."""

    def __init__(self, type_: type) -> None:
        self._name = type_.__name__
        self._accepts: tuple[type, ...] = (int, float) if type_ is float else (type_,)
        self._bool = type_ is bool

    def _fits(self, value: Any) -> bool:
        return isinstance(value, self._accepts) and (self._bool or not isinstance(value, bool))

    def encode(self, value: Any) -> str:
        if not self._fits(value):
            raise InvalidArgumentError(f"is {type(value).__name__}, but the queue declares {self._name}")
        return dump_json(value)

    def decode(self, text: str) -> Any:
        value = super().decode(text)
        if not self._fits(value):
            raise ReplyShapeError(f"is {type(value).__name__}, but the queue declares {self._name}")
        return value


class TypedCodec(Generic[T]):
    """JSON of any type that pydantic knows, validated on both sides."""

    def __init__(self, type_: TypeForm[T]) -> None:
        self._type = type_
        self._adapter: Any = None

    def _get(self) -> Any:
        # pydantic costs 65 ms of CPU: a declaration at import time must not pay for it.
        if self._adapter is None:
            from pydantic import TypeAdapter

            self._adapter = TypeAdapter(self._type)
        return self._adapter

    def encode(self, value: T) -> str:
        from pydantic import ValidationError
        from pydantic_core import PydanticSerializationError

        adapter = self._get()
        try:
            # Models are validated already; a plain dict for a model is checked here, before anything is sent.
            checked = adapter.validate_python(value)
            return dump_json(adapter.dump_python(checked, mode="json", by_alias=True))
        except ValidationError as error:
            raise InvalidArgumentError(_explain(error)) from None
        except PydanticSerializationError as error:
            raise InvalidArgumentError(f"cannot be written as JSON: {type(error).__name__}") from None

    def decode(self, text: str) -> T:
        from pydantic import ValidationError

        try:
            return cast("T", self._get().validate_json(text))
        except ValidationError as error:
            raise ReplyShapeError(_explain(error)) from None


def _explain(error: Any) -> str:
    """A pydantic error without the input: its own str() quotes it, and the input may be a prompt."""
    parts: list[str] = []
    for item in error.errors(include_input=False, include_url=False, include_context=False)[:5]:
        where = ".".join(str(step) for step in item["loc"]) or "value"
        own = item["type"] in ("value_error", "assertion_error")  # the text of a user's validator may quote
        parts.append(f"{where}: {'invalid value' if own else item['msg']}")
    return f"does not fit {error.title}: " + "; ".join(parts)


def codec_for(type_: Any, what: str) -> Codec[Any]:
    """The codec of a declared type: plain JSON for plain JSON types, pydantic for the rest."""
    if hasattr(type_, "encode") and hasattr(type_, "decode") and not isinstance(type_, type):
        return cast("Codec[Any]", type_)
    try:
        plain = type_ in (Any, object)
    except TypeError:
        plain = False
    if plain:
        return JsonCodec()
    if type_ in (str, int, float, bool, dict, list):
        return PlainCodec(type_)
    if isinstance(type_, (int, float, str, bytes, list, tuple)):
        raise InvalidArgumentError(f"{what}={type_!r} is a value, not a type; give a type such as str or a model class")
    return TypedCodec(type_)
