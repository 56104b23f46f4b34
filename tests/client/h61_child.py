"""The child of test_h61: an interpreter that lacks what WebAssembly lacks. Its standard streams are its fetch()."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import Any

WHAT, URL, TOKEN, QUEUE = sys.argv[1:]

# -- take away ---------------------------------------------------------------------------------------------------------


MISSING = ("ssl", "_ssl", "click", "rich")  # the last two: httpx's own command, which comes with no client of ours


class Missing:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in MISSING:
            raise ImportError(f"there is no {name} here")


def forbid(what: str) -> Any:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"{what} was used")

    return refuse


assert "ssl" not in sys.modules
sys.meta_path.insert(0, Missing())
import asyncio  # noqa: E402

sys.platform = "emscripten"
socket.socket = type("socket", (), {"__init__": forbid("a socket")})  # type: ignore[misc]
socket.getaddrinfo = forbid("name resolution")
threading.Thread.start = forbid("a thread")  # type: ignore[method-assign]
subprocess.Popen = type("Popen", (), {"__init__": forbid("a process")})  # type: ignore[misc]
signal.signal = forbid("a signal")

randomness = {"os.urandom": os.urandom, "random.random": random.random, "random.uniform": random.uniform}
os.urandom = forbid("randomness")
random.random = random.uniform = forbid("randomness")
random.randrange = random.randint = random.choice = random.getrandbits = forbid("randomness")

# -- and give fetch() --------------------------------------------------------------------------------------------------


class JsException(Exception):
    pass


class AbortController:
    def __init__(self) -> None:
        self.signal = self
        self.aborted = False

    @classmethod
    def new(cls) -> AbortController:
        controllers.append(cls())
        return controllers[-1]

    def abort(self) -> None:
        self.aborted = True


controllers: list[AbortController] = []


class Reader:
    def __init__(self, text: str) -> None:
        data = text.encode()
        self._parts = [data[at : at + 7] for at in range(0, len(data), 7)]  # as a network would cut it: anywhere

    async def read(self) -> Any:
        if not self._parts:
            return types.SimpleNamespace(done=True, value=None)
        part = self._parts.pop(0)
        return types.SimpleNamespace(done=False, value=types.SimpleNamespace(to_bytes=lambda: part))


async def fetch(url: str, options: dict[str, Any]) -> Any:
    if "refused" in url:
        raise JsException("TypeError: fetch failed")
    if "silent" in url:
        await asyncio.sleep(60)
    wish = {
        "url": url,
        "method": options["method"],
        "headers": dict(options["headers"]),
        "body": options["body"].decode(),
        "redirect": options["redirect"],
    }
    print(json.dumps(wish), flush=True)
    answer = json.loads(sys.stdin.readline())
    if wish["body"].startswith('["EVALSHA"') and "lose" in lost:
        lost.remove("lose")
        raise JsException("Error: Network connection lost.")
    body = types.SimpleNamespace(getReader=lambda: Reader(answer["body"])) if answer["body"] else None
    return types.SimpleNamespace(status=answer["status"], headers=answer["headers"], body=body)


lost: list[str] = []
js: Any = types.ModuleType("js")
js.fetch, js.AbortController, js.Object = fetch, AbortController, types.SimpleNamespace(fromEntries=dict)
ffi: Any = types.ModuleType("pyodide.ffi")
ffi.JsException, ffi.to_js = JsException, lambda value, dict_converter=None: value
sys.modules |= {"js": js, "pyodide": types.ModuleType("pyodide"), "pyodide.ffi": ffi}


class Loop(asyncio.BaseEventLoop):
    """An event loop that can only wait for the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("waits for something that cannot happen")
        time.sleep(timeout)
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


# -- the program that would run there, as far as it runs at import ----------------------------------------------------

import outlast  # noqa: E402
import outlast_edge  # noqa: E402, F401
from outlast import aio, client, jsfetch, rest  # noqa: E402, F401

plain = outlast.Queue(QUEUE)
async_client = outlast.AsyncClient.from_env({"UPSTASH_REDIS_REST_URL": URL, "UPSTASH_REDIS_REST_TOKEN": TOKEN})
jobs = async_client.queue(plain)
sync_jobs = outlast.Client(URL, TOKEN).queue(plain)

os.urandom, random.random, random.uniform = randomness.values()  # from here on a request is being served


async def calls() -> dict[str, Any]:
    made = await jobs.enqueue({"prompt": "žluťoučký 🐎"})
    job = await jobs.get(made.id)
    assert job is not None
    report: dict[str, Any] = {"id": made.id, "job": {"payload": job.payload, "status": job.status}}
    report["cancelled"] = await jobs.cancel(made.id)
    report["events"] = [event.type async for event in jobs.watch(made.id)]
    lost.append("lose")
    again = await jobs.enqueue({"prompt": "again"}, id=made.id)
    assert not lost
    report["repeated"] = again.id
    return report


async def faults() -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in ("refused", "silent"):
        begin = time.monotonic()
        transport = rest.AsyncRestTransport(f"https://{name}.example", TOKEN, timeout=1, read_timeout=0.2)
        try:
            await outlast.AsyncClient(transport=transport).queue(plain).get("x")
        except outlast.OutlastError as error:
            report[name] = {
                "error": type(error).__name__,
                "message": str(error),
                "maybe_applied": getattr(error, "maybe_applied", None),
                "aborted": controllers[-1].aborted,
                "seconds": time.monotonic() - begin,
            }
    return report


match WHAT:
    case "import":
        report = {"tls": "ssl" in sys.modules, "pydantic": "pydantic" in sys.modules}
    case "calls":
        report = Loop().run_until_complete(calls())
    case "faults":
        report = Loop().run_until_complete(faults())
    case _:
        try:
            sync_jobs.get("x")
        except Exception as error:
            report = {"error": type(error).__name__, "message": str(error)}
print(json.dumps({"report": report}), flush=True)
