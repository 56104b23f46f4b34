"""The agent loop: model, tools, model, … until there is an answer. Every turn and every tool result is a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from outlast import Queue
from outlast._checks import Duration, check_count, to_ms
from outlast.errors import InvalidArgumentError, RetryJobError, TerminalJobError

from .messages import Budget, Party, PromptRequest, RequestCodec, reply
from .model import ChatModel
from .tools import Tool

if TYPE_CHECKING:
    from outlast_worker import JobContext

__all__ = ["Agent"]

INSTRUCTIONS = "Do what the user asks. Use the tools where they help, and say so where you cannot know."
COUNTERS = ("input_tokens", "cache_read_tokens", "cache_create_tokens", "output_tokens", "llm_calls", "tool_calls")
MOST_OUTPUT = 64 * 1024
"""Characters of a tool's output that the model is shown."""


class Limits(NamedTuple):
    max_tokens: int
    max_iterations: int
    call_timeout: float

    def lowered(self, budget: Budget) -> Limits:
        """A request may only lower: what it leaves out, and what is above, changes nothing."""
        return Limits(
            min(self.max_tokens, budget.max_tokens or self.max_tokens),
            min(self.max_iterations, budget.max_iterations or self.max_iterations),
            min(self.call_timeout, budget.call_seconds or self.call_timeout),
        )


class _Failed(Exception):
    """The run is over without an answer: what its v1 error says."""

    def __init__(self, error: str, stop_reason: str) -> None:
        super().__init__(error)
        self.stop_reason = stop_reason


class Agent:
    """Answers v1 prompt requests: ``worker.handles(agent.queue)(agent.run)``.

    A job's payload is a request, its result a v1 result, or a v1 error for a run that failed: such a job has completed,
    for a refusal or a spent budget fails the same way again. A payload that is no request ends the job as failed.
    Whoever may enqueue here runs the model with every tool.

    - `queue`: a name, or a Queue with settings of its own (lease, timeout, max_attempts, …).
    - `tools`: plain typed functions (see `Tool`). They run one after another, and one that was under way when a worker
      died runs again.
    - `model`: see `ChatModel`. `instructions`: the system prompt.
    - `name`, `instance`: the sender of the answers.
    - `max_payload`: bytes of a payload, checked before anything decodes it.
    - `max_tokens`, `max_iterations`, `call_timeout`: a job's budget over all its attempts: tokens in and out, checked
      after each model call, so that one call may overshoot; model calls; seconds of one call. A request may only lower
      them.
    - `max_output_tokens`: of one model call; by default the endpoint's own.
    """

    def __init__(
        self,
        *,
        queue: str | Queue[Any, Any] = "agent",
        tools: Sequence[Callable[..., Any]] = (),
        model: ChatModel | None = None,
        instructions: str = INSTRUCTIONS,
        name: str = "worker",
        instance: str | None = None,
        max_payload: int = 524_288,
        max_tokens: int = 200_000,
        max_iterations: int = 50,
        call_timeout: Duration = 120.0,
        max_output_tokens: int | None = None,
    ) -> None:
        self.queue: Queue[PromptRequest, dict[str, Any]] = Queue(queue) if isinstance(queue, str) else copy(queue)
        self.queue.payload_codec = RequestCodec(max_payload)
        self.queue.max_payload = check_count(max_payload, "max_payload", most=512 * 1024 * 1024)
        self._tools = {tool.name: tool for tool in map(Tool, tools)}
        if len(self._tools) < len(tools):
            raise InvalidArgumentError("two tools have the same name; the model could not tell them apart")
        self._model = model or ChatModel()
        self._instructions = instructions
        try:
            self._sender = Party(name=name, instance=instance)
        except ValidationError:
            raise InvalidArgumentError(
                f"name={name!r}, instance={instance!r}: a v1 sender has letters, digits, - and _ only"
            ) from None
        self._limits = Limits(
            check_count(max_tokens, "max_tokens", most=10**12),
            check_count(max_iterations, "max_iterations", most=10**6),
            to_ms(call_timeout, "call_timeout", least=0.001) / 1000,
        )
        self._max_output_tokens = (
            None if max_output_tokens is None else check_count(max_output_tokens, "max_output_tokens", most=10**9)
        )

    def __repr__(self) -> str:
        return f"Agent({self.queue.name!r}, tools={list(self._tools)})"

    async def run(self, job: JobContext[PromptRequest]) -> dict[str, Any]:
        """The handler. What earlier attempts did is read from the steps; a whole answer among them is the answer."""
        return await job.step("answer", self._answer, job)

    async def _answer(self, job: JobContext[PromptRequest]) -> dict[str, Any]:
        request = job.payload
        used: Counter[str] = Counter()
        try:
            text = await self._converse(job, self._limits.lowered(request.budget), used)
        except (RetryJobError, TerminalJobError) as error:
            if isinstance(error, RetryJobError) and job.attempt < job.max_attempts:
                raise
            return reply(request, self._sender, "error", error=str(error), stop_reason="error")
        except _Failed as error:
            return reply(request, self._sender, "error", error=str(error), stop_reason=error.stop_reason)
        usage = {name: used[name] for name in COUNTERS if used[name]}
        return reply(request, self._sender, "result", stop_reason="end_turn", text=text, usage=usage)

    async def _converse(self, job: JobContext[PromptRequest], limits: Limits, used: Counter[str]) -> str:
        request = job.payload
        hints = request.tool_hints
        tools = {name: tool for name, tool in self._tools.items() if hints is None or name in hints}
        prompt = f"{request.context}\n\n{request.prompt}" if request.context else request.prompt
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._instructions},
            {"role": "user", "content": prompt},
        ]
        for iteration in range(1, limits.max_iterations + 1):
            fresh = False

            async def call() -> dict[str, Any]:
                nonlocal fresh
                fresh = True
                return await self._call(job, messages, list(tools.values()), limits)

            turn = await job.step(f"turn-{iteration}", call)
            message, finish = turn["message"], turn["finish"]
            if not fresh and request.stream and message["content"]:
                await job.emit(message["content"])  # watchers have been told to start over
            used.update(turn["usage"], llm_calls=1)
            messages.append(message)
            calls: list[dict[str, Any]] = message.get("tool_calls") or []
            if finish == "content_filter":
                raise _Failed("the model refused", "refusal")
            if finish == "length":  # its last tool call may be half of one
                raise _Failed("the model's reply was cut off at its limit of tokens", "max_tokens")
            if not calls:
                return str(message["content"])
            if used["input_tokens"] + used["output_tokens"] >= limits.max_tokens:
                raise _Failed(f"the budget of {limits.max_tokens} tokens is used up", "budget_exhausted")
            if iteration == limits.max_iterations:
                break  # nobody would read what these tools find
            for place, wanted in enumerate(calls):
                kept = await job.step(f"tool-{iteration}-{place}", self._use, job, tools, wanted)
                used["tool_calls"] += 1
                messages.append({"role": "tool", "tool_call_id": wanted["id"], "content": kept["content"]})
        raise _Failed(f"no answer after {limits.max_iterations} model calls", "max_iterations")

    async def _call(
        self, job: JobContext[PromptRequest], messages: list[dict[str, Any]], tools: list[Tool], limits: Limits
    ) -> dict[str, Any]:
        turn = await self._model.turn(
            messages,
            tools=[tool.definition for tool in tools],
            max_tokens=self._max_output_tokens,
            timeout=limits.call_timeout,
            on_text=job.emit if job.payload.stream else None,
        )
        job.usage(**turn["usage"], llm_calls=1)
        return turn

    async def _use(
        self, job: JobContext[PromptRequest], tools: dict[str, Tool], wanted: dict[str, Any]
    ) -> dict[str, Any]:
        id, name, arguments = wanted["id"], wanted["function"]["name"], wanted["function"]["arguments"]
        if job.payload.stream:
            await job.emit({"tool_call": {"id": id, "name": name, "input": json.loads(arguments)}})
        tool = tools.get(name)
        text, is_error = await tool(arguments) if tool else (f"there is no tool {name!r}", True)
        if len(text) > MOST_OUTPUT:
            text = f"{text[:MOST_OUTPUT]}\n[cut: {len(text) - MOST_OUTPUT} more characters]"
        job.usage(tool_calls=1)
        if job.payload.stream:
            await job.emit({"tool_result": {"call_id": id, "is_error": is_error}})
        return {"tool_use_id": id, "content": f"Error: {text}" if is_error else text, "is_error": is_error}
