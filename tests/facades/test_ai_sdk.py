"""The AI SDK's routes over HTTP. The SDK itself runs against them in tests/runtimes/facades."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis

from outlast import Queue
from outlast.protocol import Keys
from outlast_edge import ANY, Edge
from outlast_edge.facades.ai_sdk import AiSdk

from .conftest import Hand, Site

HELLO = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}


def ask(chat: str = "c1", *messages: Any, **more: Any) -> dict[str, Any]:
    return {"id": chat, "messages": [*(messages or (HELLO,))], "trigger": "submit-message", **more}


@contextmanager
def chunks(site: Site, method: str, path: str, **options: Any) -> Iterator[Iterator[Any]]:
    """The chunks of a stream as they come, and "[DONE]"."""
    with site.http.stream(method, path, **options) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["x-vercel-ai-ui-message-stream"] == "v1"

        def each() -> Iterator[Any]:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                else:
                    assert line in ("", ":"), line

        yield each()


def kinds(parts: Iterator[Any]) -> list[str]:
    return [part if isinstance(part, str) else part["type"] for part in parts]


@pytest.fixture
def ai(site: Callable[..., Site]) -> Site:
    return site(AiSdk)


def test_a_message_is_streamed_as_one_message(ai: Site, hand: Hand) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        start = next(parts)
        assert start["type"] == "start"
        job_id = hand.take()
        assert start["messageId"] == job_id
        hand.say("Hel", "lo")
        hand.end("Hello")
        rest = list(parts)
    assert [part if part == "[DONE]" else part["type"] for part in rest] == [
        "start-step", "text-start", "text-delta", "text-delta", "text-end", "finish-step", "finish", "[DONE]",
    ]  # fmt: skip
    assert [part["delta"] for part in rest if part != "[DONE]" and "delta" in part] == ["Hel", "lo"]


def test_the_handlers_payload_is_the_body(ai: Site, hand: Hand) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask(model="m", extra=[1])):
        hand.take()
        assert json.loads(hand.job.payload) == ask(model="m", extra=[1])


def test_chunks_of_the_sdk_pass_and_other_values_are_wrapped(ai: Site, hand: Hand) -> None:
    tool = {"type": "tool-input-available", "toolCallId": "t", "toolName": "look", "input": {"x": 1}}
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        hand.take()
        hand.say("a", tool, {"rows": 3}, {"type": "finish"}, [1], "b")
        hand.end("ab")
        got = list(parts)
    assert tool in got
    assert {"type": "data-outlast", "data": {"rows": 3}} in got
    assert {"type": "data-outlast", "data": {"type": "finish"}} in got, "how it ends is not the worker's to say"
    assert [part["type"] for part in got if part != "[DONE]"].count("finish") == 1


def test_resume_replays_from_the_start_and_204_means_nothing_to_resume(ai: Site, hand: Hand) -> None:
    assert ai.http.get("/api/chat/c1/stream").status_code == 204
    with chunks(ai, "POST", "/api/chat", json=ask()) as first:
        hand.take()
        hand.say("one ")
        while next(first)["type"] != "text-delta":
            pass
    with chunks(ai, "GET", "/api/chat/c1/stream") as second:
        hand.say("two")
        hand.end("one two")
        got = list(second)
    assert got[0] == {"type": "start", "messageId": hand.job.id}
    assert "".join(part.get("delta", "") for part in got if part != "[DONE]") == "one two"
    assert ai.http.get("/api/chat/c1/stream").status_code == 204


def test_replay_finished_gives_an_answer_that_has_ended(site: Callable[..., Site], hand: Hand) -> None:
    ai = site(lambda edge: AiSdk(edge, replay_finished=True))
    with chunks(ai, "POST", "/api/chat", json=ask()):
        hand.take()
    hand.end("late")
    with chunks(ai, "GET", "/api/chat/c1/stream") as parts:
        assert [part["delta"] for part in parts if part != "[DONE]" and "delta" in part] == ["late"]


def test_leaving_does_not_cancel_but_stop_does(ai: Site, hand: Hand, raw: redis.Redis, keys: Keys) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        hand.take()
        hand.say("on")
        while next(parts)["type"] != "text-delta":
            pass
    assert raw.hget(keys.job(hand.job.id), "cancelRequested") is None
    assert ai.http.post("/api/chat/c1/stop", json={"activeStreamId": "an-older-one"}).json() == {"success": True}
    assert raw.hget(keys.job(hand.job.id), "cancelRequested") is None, "it meant an answer before this one"
    with chunks(ai, "GET", "/api/chat/c1/stream") as parts:
        assert ai.http.post("/api/chat/c1/stop").json() == {"success": True}
        assert raw.hget(keys.job(hand.job.id), "cancelRequested") == b"1"
        hand.end("", "cancelled")
        assert kinds(parts)[-4:] == ["text-end", "abort", "finish", "[DONE]"]
    assert ai.http.post("/api/chat/c1/stop").json() == {"success": True}


def test_a_failure_is_told_in_general_words(ai: Site, hand: Hand) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        hand.take()
        hand.end("KeyError: secret-host", "failed")
        got = [part for part in parts if part != "[DONE]"]
    assert got[-2:] == [
        {"type": "error", "errorText": "The job failed."},
        {"type": "finish", "finishReason": "error"},
    ]


def test_the_same_message_once_more_is_the_same_job(ai: Site, hand: Hand) -> None:
    for _ in range(2):
        with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
            next(parts)
    assert hand.jobs() == 1
    hand.take()
    hand.end("once")
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        assert "once" in [part.get("delta") for part in parts if part != "[DONE]"], "also after its end"
    assert hand.jobs() == 0


def test_a_regeneration_is_a_new_job_each_time(ai: Site, hand: Hand) -> None:
    for _ in range(2):
        with chunks(ai, "POST", "/api/chat", json=ask(trigger="regenerate-message")) as parts:
            next(parts)
        hand.take()
        hand.end("x")
    assert hand.requests == 2


def test_a_new_message_takes_the_place_of_the_answer_that_is_under_way(ai: Site, hand: Hand) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        next(parts)
    other = {**HELLO, "id": "u2"}
    with chunks(ai, "POST", "/api/chat", json=ask("c1", HELLO, other)) as parts:
        message_id = next(parts)["messageId"]
        assert hand.jobs() == 1, "the first was cancelled: nobody could see its answer"
        assert hand.take() == message_id
    with chunks(ai, "GET", "/api/chat/c1/stream") as parts:
        assert next(parts)["messageId"] == message_id


def test_supersede_can_be_switched_off(site: Callable[..., Site], hand: Hand) -> None:
    ai = site(lambda edge: AiSdk(edge, supersede=False))
    for n in range(2):
        with chunks(ai, "POST", "/api/chat", json=ask("c1", {**HELLO, "id": f"u{n}"})) as parts:
            next(parts)
    assert hand.jobs() == 2


def test_after_a_tool_call_the_answer_goes_on_with_the_same_message(ai: Site, hand: Hand) -> None:
    reply = {"id": "a1", "role": "assistant", "parts": []}
    with chunks(ai, "POST", "/api/chat", json=ask("c1", HELLO, reply)) as parts:
        assert next(parts)["messageId"] == "a1"
        hand.take()
    with chunks(ai, "GET", "/api/chat/c1/stream") as parts:
        assert next(parts)["messageId"] == "a1", "on a resume too"


def test_ids_of_other_people_lead_nowhere(site: Callable[..., Site], hand: Hand) -> None:
    ai = site(AiSdk, authorize=lambda request, action, job: request.headers.get("x-user"))
    ann, bob = {"x-user": "ann"}, {"x-user": "bob"}
    with chunks(ai, "POST", "/api/chat", json=ask(), headers=ann) as parts:
        run = RUN + next(parts)["messageId"]
    assert ai.http.post("/api/chat", json=ask()).status_code == 403
    for id in ("c1", run):
        assert ai.http.get(f"/api/chat/{id}/stream", headers=bob).status_code == 204
        assert ai.http.get(f"/api/chat/{id}/stream").status_code == 204
        assert ai.http.get(f"/api/chat/{id}/stream?startIndex=0", headers=bob).status_code == 404
        ai.http.post(f"/api/chat/{id}/stop", headers=bob)
        with chunks(ai, "GET", f"/api/chat/{id}/stream", headers=ann) as parts:
            next(parts)
    assert hand.jobs() == 1
    with chunks(ai, "POST", "/api/chat", json=ask(), headers=bob) as parts:
        assert RUN + next(parts)["messageId"] != run, "the same message of somebody else is another job"


RUN = "run-"


def test_a_cut_off_breaks_the_connection_and_a_counting_client_is_sent_on(
    site: Callable[..., Site], hand: Hand
) -> None:
    ai = site(AiSdk, max_stream=0.3)
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        run = RUN + next(parts)["messageId"]
        hand.take()
        hand.say("a")
        # An end in good order would be a whole answer to useChat.
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)
    with chunks(ai, "GET", f"/api/chat/{run}/stream?startIndex=3") as parts:
        assert [part["type"] for part in parts] == ["text-delta"]
    with chunks(ai, "GET", f"/api/chat/{run}/stream?startIndex=-2") as parts:
        assert next(part["type"] for part in parts) == "start"


def test_a_counting_client_goes_on_where_it_was_and_gets_its_finish(ai: Site, hand: Hand) -> None:
    with ai.http.stream("POST", "/api/chat", json={"messages": [HELLO]}) as response:
        run = response.headers["x-workflow-run-id"]
    hand.take()
    hand.say("a", "b", "c")
    hand.end("abc")
    with chunks(ai, "GET", f"/api/chat/{run}/stream?startIndex=4") as parts:
        assert kinds(parts) == ["text-delta", "text-delta", "text-end", "finish-step", "finish", "[DONE]"]
    with chunks(ai, "GET", f"/api/chat/{run}/stream?startIndex=99") as parts:
        assert kinds(parts) == ["finish", "[DONE]"], "without it the client would ask for ever"
    with chunks(ai, "GET", f"/api/chat/{run}/stream?startIndex=-3") as parts:
        assert kinds(parts)[0] == "start"
    head = ai.http.get(f"/api/chat/{run}/stream?startIndex=-3").headers
    assert max(0, int(head["x-workflow-stream-tail-index"]) + 1 - 3) == 0, "as the client resolves it"
    assert ai.http.get(f"/api/chat/{run}/stream?startIndex=x").status_code == 400


@pytest.mark.parametrize("restart", ["data", "reset-step"])
def test_a_restart_is_told(site: Callable[..., Site], hand: Hand, restart: Any) -> None:
    ai = site(lambda edge: AiSdk(edge, restart=restart))
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        hand.take()
        hand.say("wro")
        while next(parts)["type"] != "text-delta":
            pass
        hand.again()
        hand.say("right")
        hand.end("right")
        got = [part for part in parts if part != "[DONE]" and not part.get("transient")]
    told = "reset-step" if restart == "reset-step" else "data-outlast-restarted"
    assert [part["type"] for part in got] == [
        "text-end", told, "text-start", "text-delta", "text-end", "finish-step", "finish",
    ]  # fmt: skip


def test_a_body_without_its_type_is_taken_from_the_own_site_only(ai: Site, hand: Hand) -> None:
    """WorkflowChatTransport sends text/plain, and so can a form of any site, with the visitor's cookies."""
    body = json.dumps({"messages": [HELLO]})
    plain = {"content-type": "text/plain;charset=UTF-8"}
    own = {"origin": "https://own.example", "sec-fetch-site": "same-origin"}
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    for headers, status in ((plain, 200), (plain | own, 200), (plain | foreign, 415)):
        with ai.http.stream("POST", "/api/chat", content=body, headers=headers) as response:
            assert response.status_code == status
    assert hand.jobs() == 2


def test_refusals_are_texts_for_a_reader(site: Callable[..., Site], queue_name: str) -> None:
    ai = site(AiSdk, queues=[Queue(queue_name, payload=int)])
    response = ai.http.post("/api/chat", json=ask())
    assert response.status_code == 422
    assert response.text.startswith("The payload is dict")
    assert ai.http.post("/api/chat", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_head_holds_no_stream(ai: Site, hand: Hand) -> None:
    with chunks(ai, "POST", "/api/chat", json=ask()) as parts:
        next(parts)
    assert ai.http.head("/api/chat/c1/stream").status_code == 405


def test_a_chats_id_can_be_any_text(ai: Site, hand: Hand) -> None:
    for n, (id, path) in enumerate((("a/b c", "a%2Fb%20c"), ("ü?#", "%C3%BC%3F%23"), ("x/stream", "x%2Fstream"))):
        with chunks(ai, "POST", "/api/chat", json=ask(id)) as parts:
            message_id = next(parts)["messageId"]
        with chunks(ai, "GET", f"/api/chat/{path}/stream") as parts:
            assert next(parts)["messageId"] == message_id
        assert hand.jobs() == n + 1


def test_two_messages_at_once_make_two_jobs_and_the_chat_finds_one(ai: Site, hand: Hand) -> None:
    ids: list[str] = []

    def send(n: int) -> None:
        with chunks(ai, "POST", "/api/chat", json=ask("c1", {**HELLO, "id": f"u{n}"})) as parts:
            ids.append(next(parts)["messageId"])

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 4
    assert hand.jobs() == 1, "each took the place of the one before"
    with chunks(ai, "GET", "/api/chat/c1/stream") as parts:
        assert next(parts)["messageId"] == hand.take()


def test_it_can_be_mounted_with_the_edges_own_routes(site: Callable[..., Site], hand: Hand) -> None:
    from starlette.applications import Starlette

    def both(edge: Edge) -> Any:
        class Made:
            def app(self) -> Starlette:
                return Starlette(routes=[*AiSdk(edge).routes, *edge.routes])

        return Made()

    served = site(both, authorize=lambda request, action, job: ANY)
    with chunks(served, "POST", "/api/chat", json=ask()) as parts:
        id = next(parts)["messageId"]
    assert served.http.get(f"/v1/jobs/{id}").json()["status"] == "waiting"
