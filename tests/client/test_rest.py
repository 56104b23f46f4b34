"""What goes over the wire, what its answers mean, and what is sent again."""

from __future__ import annotations

import itertools
import json
import time
from base64 import b64encode
from typing import Any

import httpx
import pytest
import respx

import outlast
from outlast.errors import (
    AuthError,
    ConfigurationError,
    QuotaExceededError,
    ServerError,
    StoreFullError,
    TransportError,
)
from outlast.protocol import Call, Keys, calls
from outlast.rest import backoff
from outlast.transport import TRANSIENT, server_error

from .conftest import TOKEN, URL, Rest


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses take no time, except where they are the subject."""
    if "pace" not in request.fixturenames:
        monkeypatch.setattr("outlast.rest.backoff", lambda repeat: 0.001)


@pytest.fixture
def pace() -> None:
    """The test is about pauses."""


def raw(reply: Any) -> Any:
    return reply


PING = Call(("GET", "k"), raw)
UNSAFE = Call(("LPUSH", "k", "v"), raw, replayable=False)
CANCEL = calls.cancel(Keys("q"), "id", result_ttl_ms=1000)


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


def ok(value: Any, **headers: str) -> httpx.Response:
    return httpx.Response(200, json={"result": value}, headers=headers)


def refused(message: str, status: int = 400) -> httpx.Response:
    return httpx.Response(status, json={"error": message})


def bodies(route: respx.Route) -> list[Any]:
    return [json.loads(call.request.content) for call in route.calls]


# -- requests and replies ---------------------------------------------------------------------------------------------


@respx.mock
def test_a_call_is_one_post_with_the_token_in_a_header_and_nowhere_else(rest: Rest) -> None:
    route = respx.post(URL).mock(return_value=ok(b64("ž")))
    assert rest.send(Call(("SET", "k", 'ž " \\ \x00 🐎', "1"), raw)) == "ž".encode()
    request = route.calls.last.request
    assert request.url == URL + "/" or str(request.url) == URL
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.headers["upstash-encoding"] == "base64"
    assert request.headers["content-type"] == "application/json"
    assert "upstash-sync-token" not in request.headers
    assert bodies(route) == [["SET", "k", 'ž " \\ \x00 🐎', "1"]]


@respx.mock
@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ("OK", "OK"),
        (b64("OK"), b"OK"),
        ("", b""),
        (None, None),
        (5, 5),
        (2**53 + 1, 2**53 + 1),
        ([], []),
        ([b64("a"), None, 3, [b64("b"), "OK"]], [b"a", None, 3, [b"b", "OK"]]),
        (b64encode(b"\xff\x00").decode(), b"\xff\x00"),
    ],
)
def test_replies_are_decoded_to_the_byte(rest: Rest, sent: Any, got: Any) -> None:
    respx.post(URL).mock(return_value=ok(sent))
    assert rest.send(PING) == got


@respx.mock
def test_a_pipeline_keeps_every_slot_and_raises_the_first_refusal_after_all_were_read(rest: Rest) -> None:
    slots = [{"result": b64("a")}, {"error": "WRONGTYPE no"}, {"result": 3}, {"error": "ERR later"}]
    route = respx.post(URL + "/pipeline").mock(return_value=httpx.Response(200, json=slots))
    with pytest.raises(ServerError, match="WRONGTYPE") as caught:
        rest.send_many([PING] * 4)
    assert caught.value.code == "WRONGTYPE"
    route.mock(return_value=httpx.Response(200, json=slots[::2]))
    assert rest.send_many([PING] * 2) == [b"a", 3]
    assert bodies(route)[1] == [["GET", "k"]] * 2
    assert rest.send_many([]) == []
    assert route.call_count == 2


@respx.mock
def test_noscript_is_healed_by_one_eval(rest: Rest) -> None:
    route = respx.post(URL).mock(
        side_effect=[refused("NOSCRIPT No matching script. Please use EVAL."), ok(b64("cancelled"))]
    )
    assert rest.send(CANCEL) == "cancelled"
    first, second = bodies(route)
    assert first[0] == "EVALSHA"
    assert second == list(CANCEL.command(source=True))


@respx.mock
def test_noscript_after_eval_is_an_error(rest: Rest) -> None:
    route = respx.post(URL).mock(return_value=refused("NOSCRIPT No matching script."))
    with pytest.raises(ServerError, match="NOSCRIPT"):
        rest.send(CANCEL)
    assert route.call_count == 2


@respx.mock
def test_noscript_and_transient_refusals_heal_slot_by_slot(rest: Rest) -> None:
    answers = [
        [{"result": b64("one")}, {"error": "NOSCRIPT No"}, {"error": "LOADING"}, {"error": "NOSCRIPT No"}],
        [{"result": b64("unknown")}, {"error": "BUSY wait"}, {"result": b64("cancelled")}],
        [{"result": 7}],
    ]
    route = respx.post(URL + "/pipeline").mock(side_effect=[httpx.Response(200, json=answer) for answer in answers])
    assert rest.send_many([PING, CANCEL, PING, CANCEL]) == [b"one", "unknown", 7, "cancelled"]
    sent = bodies(route)
    assert [command[0] for command in sent[1]] == ["EVAL", "GET", "EVALSHA"], "the first brings the text for all"
    assert sent[2] == [["GET", "k"]]


@respx.mock
def test_the_sync_token_is_kept_sent_and_handed_over(make_rest: Any) -> None:
    route = respx.post(URL).mock(
        side_effect=[ok(1, **{"upstash-sync-token": "17"}), ok(2), ok(3, **{"upstash-sync-token": "9"})]
    )
    one = make_rest()
    assert one.transport.sync_token is None
    for value in (1, 2, 3):
        assert one.send(PING) == value
    tokens = [call.request.headers.get("upstash-sync-token") for call in route.calls]
    assert tokens == [None, "17", "17"]
    assert one.transport.sync_token == "17", "the late answer of a lagging replica does not set it back"
    other = make_rest(sync_token=one.transport.sync_token)
    route.mock(return_value=ok(4, **{"upstash-sync-token": "opaque"}))
    assert other.send(PING) == 4
    assert route.calls.last.request.headers["upstash-sync-token"] == "17"
    assert other.transport.sync_token == "opaque"


# -- what is sent again -----------------------------------------------------------------------------------------------

HTML = httpx.Response(502, html="<html><head><title>502 Bad Gateway</title></head><body>payload</body></html>")


@respx.mock
@pytest.mark.parametrize(
    "fault",
    [
        httpx.ReadError("cut"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        httpx.WriteError("broken pipe"),
        httpx.ReadTimeout("silent"),
        HTML,
        httpx.Response(200, text=""),
        httpx.Response(503, json={"error": "ERR upstream connect error"}),
    ],
    ids=repr,
)
def test_an_unknown_outcome_is_tried_again_only_if_the_call_is_replayable(rest: Rest, fault: Any) -> None:
    route = respx.post(URL).mock(side_effect=[fault, fault, ok(1)])
    assert rest.send(PING) == 1
    assert route.call_count == 3
    route.calls.clear()
    route.mock(side_effect=[fault, ok(1)])
    with pytest.raises(TransportError) as caught:
        rest.send(UNSAFE)
    assert caught.value.maybe_applied
    assert "unknown" in str(caught.value)
    respx.post(URL + "/pipeline").mock(side_effect=[fault])
    with pytest.raises(TransportError):
        rest.send_many([PING, UNSAFE])


@respx.mock
@pytest.mark.parametrize(
    "fault", [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), httpx.PoolTimeout("full")], ids=repr
)
def test_what_never_left_is_always_tried_again(rest: Rest, fault: Any) -> None:
    route = respx.post(URL).mock(side_effect=[fault, ok(1)])
    assert rest.send(UNSAFE) == 1
    route.mock(side_effect=itertools.repeat(fault))
    with pytest.raises(TransportError) as caught:
        rest.send(UNSAFE)
    assert not caught.value.maybe_applied
    assert "unknown" not in str(caught.value)


@respx.mock
def test_an_outcome_that_was_unknown_once_stays_unknown(rest: Rest) -> None:
    respx.post(URL).mock(side_effect=[httpx.ReadError("cut"), *[httpx.ConnectError("refused")] * 9])
    with pytest.raises(TransportError) as caught:
        rest.send(PING)
    assert caught.value.maybe_applied


@respx.mock
def test_faults_are_given_up_after_a_few_tries(rest: Rest) -> None:
    route = respx.post(URL).mock(return_value=HTML)
    with pytest.raises(TransportError, match=r"502.*titled '502 Bad Gateway' \(try 5\)") as caught:
        rest.send(PING)
    assert route.call_count == 5
    assert caught.value.status == 502
    assert "payload" not in str(caught.value)


@respx.mock
@pytest.mark.parametrize("code", ["LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"])
def test_h47_refusals_that_pass_are_repeated_even_for_calls_that_are_not_replayable(rest: Rest, code: str) -> None:
    route = respx.post(URL).mock(side_effect=[*[refused(f"{code} wait a little")] * 3, ok(1)])
    assert rest.send(UNSAFE) == 1
    assert route.call_count == 4


@respx.mock
def test_h47_a_refusal_that_does_not_pass_is_raised_when_the_time_is_up(make_rest: Any, pace: None) -> None:
    route = respx.post(URL).mock(return_value=refused("LOADING for ever"))
    begin = time.monotonic()
    with pytest.raises(ServerError, match="LOADING") as caught:
        make_rest(timeout=2.0).send(PING)  # long enough for a busy machine to answer the last try in time
    assert caught.value.code == "LOADING"
    assert 0.5 < time.monotonic() - begin < 4
    assert 2 < route.call_count < 15


@respx.mock
@pytest.mark.parametrize(
    ("response", "error", "code"),
    [
        (refused("OOM command not allowed when used memory > 'maxmemory'."), StoreFullError, "OOM"),
        (refused("ERR DB capacity quota exceeded"), StoreFullError, "ERR"),
        (refused("ERR max requests limit exceeded. Limit: 500000, Usage: 500000."), QuotaExceededError, "ERR"),
        (refused("ERR max requests limit exceeded. Limit: 1, Usage: 1.", 429), QuotaExceededError, "ERR"),
        (refused("WRONGPASS invalid or missing auth token", 401), AuthError, "WRONGPASS"),
        (refused("Unauthorized", 401), AuthError, "Unauthorized"),
        (httpx.Response(401, html="<html></html>"), AuthError, "WRONGPASS"),
        (refused("NOAUTH Authentication required."), AuthError, "NOAUTH"),
        (refused("NOPERM this user has no permissions to run the 'evalsha' command"), AuthError, "NOPERM"),
        (refused("WRONGTYPE Operation against a key"), ServerError, "WRONGTYPE"),
        (refused("WRONGTYPE Operation against a key", 200), ServerError, "WRONGTYPE"),
        (refused("OOM no memory", 500), StoreFullError, "OOM"),
        (refused("", 400), ServerError, "ERR"),
    ],
    ids=str,
)
def test_h47_any_other_refusal_is_raised_at_once_under_its_name(
    rest: Rest, response: httpx.Response, error: type[ServerError], code: str
) -> None:
    route = respx.post(URL).mock(return_value=response)
    with pytest.raises(error) as caught:
        rest.send(CANCEL)
    assert type(caught.value) is error
    assert caught.value.code == code
    assert route.call_count == 1
    assert TOKEN not in str(caught.value)
    if code in ("WRONGPASS", "NOAUTH", "Unauthorized"):
        assert str(caught.value).startswith(("db.example.com refused the token: ", "db.example.com answered 401"))


def test_h71_what_a_server_quotes_of_our_command_is_left_out() -> None:
    """Whichever way it came: over HTTP, through upstash_redis, over TCP."""
    assert str(server_error("ERR unknown command 'EVALSHA', with args beginning with: 'f_1' 'hunter2'")) == (
        "ERR unknown command 'EVALSHA'"
    )


def test_h47_a_refusal_inside_a_script_is_known_in_the_words_of_redis_6_too() -> None:
    sha = "f_cef59c8792abecb64ac426e53305581878e2ed5d"
    said = f"ERR Error running script (call to {sha}): @user_script:186: @user_script: 186: -"
    full = server_error(f"{said}OOM command not allowed when used memory > 'maxmemory'.")
    assert (type(full), full.code) == (StoreFullError, "OOM")
    assert server_error(f"{said}READONLY You can't write against a read only replica.").code in TRANSIENT
    assert server_error(f"ERR Error running script (call to {sha}): @user_script:1: bad -OOM ").code == "ERR"


def test_the_read_only_token_is_named_as_what_it_may_be(rest: Rest) -> None:
    with respx.mock:
        respx.post(URL).mock(return_value=refused("NOPERM this user has no permissions to run the 'evalsha' command"))
        with pytest.raises(AuthError, match="read-only token"):
            rest.send(CANCEL)


@respx.mock
def test_a_whole_pipeline_can_be_refused(rest: Rest) -> None:
    respx.post(URL + "/pipeline").mock(return_value=refused("WRONGPASS invalid or missing auth token", 401))
    with pytest.raises(AuthError):
        rest.send_many([PING, PING])


def test_pauses_double_with_jitter_up_to_two_seconds(pace: None) -> None:
    for repeat, most in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)):
        drawn = {backoff(repeat) for _ in range(50)}
        assert most / 2 <= min(drawn) < max(drawn) <= most
        assert len(drawn) > 10


@respx.mock
def test_a_dead_kept_connection_is_repeated_at_once_and_only_once(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr("outlast.rest.backoff", lambda repeat: pauses.append(repeat) or 0.0)
    dead = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    respx.post(URL).mock(side_effect=[dead, ok(1), dead, ok(2), dead, dead, ok(3)])
    assert rest.send(PING) == 1
    assert pauses == [0], "a first connection that breaks is no stale one"
    assert rest.send(PING) == 2
    assert pauses == [0]
    assert rest.send(PING) == 3
    assert pauses == [0, 1]


@respx.mock
def test_retry_after_is_obeyed_within_the_time_limit_and_told_beyond_it(make_rest: Any) -> None:
    short = httpx.Response(503, headers={"retry-after": "1"})
    route = respx.post(URL).mock(side_effect=[short, ok(1)])
    begin = time.monotonic()
    assert make_rest().send(PING) == 1
    assert time.monotonic() - begin >= 1
    for value in ("3600", "Fri, 31 Dec 9999 23:59:59 GMT"):
        route.mock(return_value=httpx.Response(429, headers={"retry-after": value}, text="slow down"))
        route.calls.clear()
        with pytest.raises(TransportError, match="429") as caught:
            make_rest().send(UNSAFE)
        assert route.call_count == 1
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= 3600
        assert not caught.value.maybe_applied
    route.mock(side_effect=[httpx.Response(429, headers={"retry-after": "nonsense"}), ok(2)])
    assert make_rest().send(UNSAFE) == 2, "a request that was turned away at the door did not run"


@respx.mock
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_h45_a_redirect_is_not_followed_and_the_token_does_not_travel(rest: Rest, status: int) -> None:
    elsewhere = respx.route(host="elsewhere.example")
    respx.post(URL).mock(return_value=httpx.Response(status, headers={"location": "https://elsewhere.example/"}))
    with pytest.raises(TransportError, match="redirect") as caught:
        rest.send(PING)
    assert caught.value.status == status
    assert not caught.value.maybe_applied
    assert not elsewhere.called


ANSWERS = {
    "html-200": httpx.Response(200, html="<html><title>Welcome</title>"),
    "empty": httpx.Response(200),
    "cut-json": httpx.Response(200, content=b'{"result":"c2VjcmV0LXBheWxvYWQ'),
    "list": httpx.Response(200, json=[]),
    "dict": httpx.Response(200, json={}),
    "text": httpx.Response(200, json="OK"),
    "null": httpx.Response(200, json=None),
    "number": httpx.Response(200, json=5),
    "nan": httpx.Response(200, content=b'{"result":NaN}'),
    "float": httpx.Response(200, json={"result": 1.5}),
    "map": httpx.Response(200, json={"result": {"a": 1}}),
    "not-base64": httpx.Response(200, json={"result": "c2VjcmV0LXBheWxvYWQ"}),
    "deep": httpx.Response(200, content=b'{"result":' + b"[" * 100_000),
    "latin-1": httpx.Response(200, content='{"result":"é"}'.encode("latin-1")),
    "utf-16": httpx.Response(200, content='{"result":"OK"}'.encode("utf-16")),
    "500": httpx.Response(500, text="Internal Server Error"),
    "404": httpx.Response(404, html="<h1>Not found</h1>"),
    "result-404": httpx.Response(404, json={"result": "OK"}),
    "gzip": httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")),
}


@respx.mock
@pytest.mark.parametrize("name", ANSWERS)
def test_h45_an_answer_that_is_none_is_a_transport_error_with_its_status(
    make_rest: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.rest.backoff", lambda repeat: 0.001)
    response = ANSWERS[name]
    respx.post(URL).mock(return_value=response)
    respx.post(URL + "/pipeline").mock(return_value=response)
    for send in (lambda: make_rest(timeout=5).send(PING), lambda: make_rest(timeout=5).send_many([PING, PING])):
        with pytest.raises(TransportError) as caught:
            send()
        assert name == "gzip" or caught.value.status == response.status_code
        assert len(str(caught.value)) < 250
        assert "c2VjcmV0" not in str(caught.value), "a reply may hold a payload"
        assert "db.example.com" in str(caught.value)


@respx.mock
def test_h45_a_pipeline_of_another_length_is_no_answer(make_rest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.rest.backoff", lambda repeat: 0.001)
    for slots in ([{"result": 1}], [{"result": 1}] * 3, [{"result": 1}, []], [{"result": 1}, None]):
        respx.post(URL + "/pipeline").mock(return_value=httpx.Response(200, json=slots))
        with pytest.raises(TransportError):
            make_rest(timeout=5).send_many([PING, PING])


@respx.mock
def test_h45_an_answer_that_is_too_large_is_dropped_unread(make_rest: Any) -> None:
    def endless() -> Any:
        yield from itertools.repeat(b"x" * 65536, 800)
        raise AssertionError("read to its end")

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Any:
            return endless()

        async def __aiter__(self) -> Any:
            for piece in endless():
                yield piece

    respx.post(URL).mock(return_value=httpx.Response(200, stream=Body()))
    with pytest.raises(TransportError, match="max_reply=1000000"):
        make_rest(max_reply=1_000_000).send(PING)
    respx.post(URL).mock(return_value=httpx.Response(200, headers={"content-length": "50000000"}, stream=Body()))
    with pytest.raises(TransportError, match="max_reply"):
        make_rest().send(PING)


@respx.mock
def test_arguments_never_come_back_in_a_message(make_rest: Any) -> None:
    rest = make_rest()
    respx.post(URL).mock(return_value=refused(f"ERR unknown command 'X', with args beginning with: 'prompt' {TOKEN}"))
    with pytest.raises(ServerError) as caught:
        rest.send(PING)
    assert str(caught.value) == "ERR unknown command 'X'"
    respx.post(URL).mock(return_value=refused(f"ERR bad token {TOKEN}\r\nnext"))
    with pytest.raises(ServerError) as caught:
        rest.send(PING)
    assert str(caught.value) == "ERR bad token ***  next"


# -- the address ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://db.example.com",
        "http://10.0.0.1:8079",
        "http://127.0.0.1.example.com",
        "ftp://db.example.com",
        "db.example.com",
        "",
        '"https://db.example.com"',
        "https://",
        "https://user:sEcReT@db.example.com",
        "https://db.example.com/?_token=sEcReT",
        "https://db.example.com:port",
        "https://[bad",
    ],
)
def test_an_address_that_cannot_work_or_would_leak_is_refused_without_being_quoted(make_rest: Any, url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_rest(url)
    assert "sEcReT" not in str(caught.value)


@pytest.mark.parametrize("token", ["", " ", "a b", "a\nb", '"abc"', "tökén", "\x00"])
def test_a_token_that_cannot_work_is_refused_without_being_quoted(make_rest: Any, token: str) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        make_rest(token=token)


@respx.mock
@pytest.mark.parametrize(
    ("url", "options"),
    [
        (URL + "/", {}),
        (URL + "///", {}),
        (f"  {URL}\n", {}),
        ("http://localhost:8079/", {}),
        ("http://127.0.0.1:8079", {}),
        ("http://[::1]:8079", {}),
        ("http://gateway.internal:8079", {"allow_http": True}),
        (URL + "/redis/", {}),
    ],
)
def test_trailing_slashes_and_blanks_do_no_harm(make_rest: Any, url: str, options: dict[str, Any]) -> None:
    base = url.strip().rstrip("/")
    respx.post(base + "/pipeline").mock(return_value=httpx.Response(200, json=[{"result": 1}]))
    respx.post(base).mock(return_value=ok(2))
    rest = make_rest(url, f" {TOKEN}\n", **options)
    assert rest.send_many([PING]) == [1]
    assert rest.send(PING) == 2


# -- a client of the caller's own -------------------------------------------------------------------------------------


def test_a_callers_httpx_client_is_used_with_our_rules_and_stays_open(make_rest: Any, kind: str) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return ok(5)

    class_ = httpx.Client if kind == "sync" else httpx.AsyncClient
    own: Any = class_(transport=httpx.MockTransport(answer), auth=("user", "other"), follow_redirects=True)
    rest = make_rest(http_client=own)
    assert rest.send(PING) == 5
    assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"
    rest.close()
    assert not own.is_closed
    made: list[Any] = []

    def factory() -> Any:
        made.append(class_(transport=httpx.MockTransport(answer)))
        return made[-1]

    second = make_rest(http_client=factory)
    assert (second.send(PING), second.send(PING), len(made)) == (5, 5, 1)
    second.close()
    assert made[0].is_closed


def test_a_closed_client_of_the_callers_is_a_transport_error() -> None:
    own = httpx.Client()
    own.close()
    jobs = outlast.Client(URL, TOKEN, http_client=own).queue(outlast.Queue("q"))
    with pytest.raises(TransportError, match="could not be asked"):
        jobs.get("x")


@respx.mock
def test_a_transport_opens_again_after_it_was_closed(rest: Rest) -> None:
    respx.post(URL).mock(return_value=ok(1))
    assert rest.send(PING) == 1
    rest.close()
    assert rest.send(PING) == 1


def test_half_a_surrogate_pair_is_refused_before_it_is_sent(rest: Rest) -> None:
    with respx.mock, pytest.raises(outlast.InvalidArgumentError, match="surrogate"):
        rest.send(Call(("SET", "k", "\ud83d"), raw))
