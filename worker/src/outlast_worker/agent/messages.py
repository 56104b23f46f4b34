"""The v1 messages: the prompt request that a job's payload is, and the result or error that becomes its result."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from outlast.codec import _explain, dump_json
from outlast.errors import InvalidArgumentError, ReplyShapeError

__all__ = ["Budget", "Party", "PromptRequest", "RequestCodec", "reply"]

NAMESPACE = "io.choria.fisk-ai.v1."

_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
"""As Go writes them, which knows both signs for micro."""
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise PydanticCustomError("time", "is not an RFC 3339 date-time such as 2026-08-15T11:30:00Z")
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        raise PydanticCustomError("time", "is no day and time that exists") from None
    return value


def _duration(value: str) -> str:
    if value != "0" and not re.fullmatch(f"({_DURATION.pattern})+", value, re.ASCII):
        raise PydanticCustomError("duration", "is not a duration such as 60s or 1m30s")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be empty")
    return value


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+\z")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Party(_Strict):
    name: Name
    instance: Name | None = None


class Budget(_Strict):
    """What a request may lower. Zero is Go's "not given", as is a value above what the agent allows."""

    max_tokens: int = Field(default=0, ge=0)
    max_iterations: int = Field(default=0, ge=0)
    call_timeout: Annotated[str, AfterValidator(_duration)] = "0"

    @property
    def call_seconds(self) -> float:
        return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(self.call_timeout))


class PromptRequest(_Strict):
    """One unit of work. `id`, `request` and `conversation` hold the same value; unknown fields are refused."""

    protocol: Literal["io.choria.fisk-ai.v1.request.prompt"]
    id: str = Field(min_length=1)
    request: str
    conversation: str
    parent: str | None = None
    sequence: int = Field(ge=0)
    time: Annotated[str, AfterValidator(_time)]
    sender: Party
    recipient: Party | None = None
    must_understand: bool = False
    prompt: Annotated[str, AfterValidator(_not_blank)]
    context: str = ""
    tool_hints: list[str] | None = None
    budget: Budget = Budget()
    stream: bool = True

    @model_validator(mode="after")
    def _same(self) -> PromptRequest:
        if not self.id == self.request == self.conversation:
            raise PydanticCustomError("ids", "id, request and conversation must hold the same value")
        return self


class RequestCodec:
    """The payload of a queue of prompt requests: checked for its size before anything decodes it, then in full.

    What it refuses ends the job for good, with the reason as its error: another attempt would read the same bytes.
    """

    def __init__(self, max_payload: int) -> None:
        self._limit = max_payload

    def encode(self, value: Any) -> str:
        try:
            request = PromptRequest.model_validate(value)
        except ValidationError as error:
            raise InvalidArgumentError(_explain(error)) from None
        return dump_json(request.model_dump(exclude_unset=True))

    def decode(self, text: str) -> PromptRequest:
        size = len(text) if text.isascii() else len(text.encode())
        if size > self._limit:
            raise ReplyShapeError(f"too large: {size} bytes, max_payload is {self._limit}")
        try:
            return PromptRequest.model_validate_json(text)
        except ValidationError as error:
            raise ReplyShapeError(f"no v1 prompt request: {_explain(error)}") from None


def reply(request: PromptRequest, sender: Party, kind: Literal["result", "error"], **body: Any) -> dict[str, Any]:
    """A v1 message that answers `request`."""
    return {
        "protocol": NAMESPACE + kind,
        "id": os.urandom(16).hex(),
        "request": request.id,
        "conversation": request.conversation,
        "sequence": 0,
        "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "sender": sender.model_dump(exclude_none=True),
        "recipient": request.sender.model_dump(exclude_none=True),
        **body,
    }
