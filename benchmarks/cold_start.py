"""What a cold function pays for its first enqueue, beside what other libraries pay for theirs.

    python -m benchmarks.cold_start            prints the table
    python -m benchmarks.cold_start --write    puts it into docs/cold-start.md, too

Each contestant has an environment of its own, made from wheels, and the interpreter for itself. A run is one process:
it imports what it needs, makes one job, has the answer and ends. Contestants take turns, and the least of all rounds
counts, because whatever else the machine does only adds. The wall clock is not looked at: it is the network's.
Everybody speaks TLS and trusts the usual authorities, as towards a database that is somewhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import random
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import PEERS

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "cold-start.md"
MARK = "<!-- below: written by python -m benchmarks.cold_start --write -->\n"
TOKEN = "benchmark"
END = """
import os
with open("/proc/self/status", "rb") as status:
    os.write(1, next(line.split()[1] for line in status if line.startswith(b"VmHWM:")))
os._exit(0)
"""
"""The most memory that the process had, in KiB; and no goodbyes, which are not what is measured."""


@dataclass(frozen=True)
class Contestant:
    """A program in two parts: what it imports, and what it does until it has its first answer."""

    name: str
    packages: tuple[str, ...]
    imports: str
    work: str = ""
    bytecode: bool = True
    """Whether the environment was compiled when it was installed."""

    @property
    def importing(self) -> str:
        return self.imports + END

    @property
    def program(self) -> str:
        return self.imports + self.work + END


CLIENT, EDGE = "outlast", "outlast_edge"
"""Our own wheels, built from this tree."""
PAYLOAD = """{"prompt": "a cold function's first words"}"""

RUN = """
async def main():
{}
asyncio.run(main())
"""


def coroutine(body: str) -> str:
    return RUN.format("\n".join("    " + line for line in body.strip().splitlines()))


BARE = Contestant(
    "a bare `httpx` post",
    ("httpx",),
    "import os, httpx",
    """
body = '["HMGET","{cold}:job:x","id","status","payload"]'
reply = httpx.Client().post(os.environ["OUTLAST_REST_URL"], content=body, headers={
    "authorization": "Bearer " + os.environ["OUTLAST_REST_TOKEN"], "content-type": "application/json"})
assert reply.json()["result"] == [None, None, None], reply.text
""",
)
OURS = Contestant(
    "**outlast**",
    (CLIENT,),
    "from outlast import Client, Queue",
    f"""
job = Client().queue(Queue("cold")).enqueue({PAYLOAD})
assert not job.deduplicated
""",
)
BARE_ASYNC = Contestant(
    BARE.name,
    BARE.packages,
    "import asyncio, os, httpx",
    coroutine(BARE.work.replace("httpx.Client().post(", "await httpx.AsyncClient().post(")),
)
OURS_ASYNC = Contestant(
    OURS.name,
    OURS.packages,
    "import asyncio\nfrom outlast import AsyncClient, Queue",
    coroutine(OURS.work.replace("Client()", "await AsyncClient()")),
)

SYNC = (
    OURS,
    BARE,
    Contestant(
        "upstash-redis, LPUSH",
        ("upstash-redis",),
        "import json\nfrom upstash_redis import Redis",
        f"""
assert Redis.from_env().lpush("cold", json.dumps({PAYLOAD}))
""",
    ),
    Contestant(
        "redis-py, LPUSH",
        ("redis",),
        "import json, os\nfrom redis import Redis",
        f"""
assert Redis.from_url(os.environ["REDIS_URL"]).lpush("cold", json.dumps({PAYLOAD}))
""",
    ),
    Contestant(
        "outlast, with a pydantic model",
        OURS.packages,
        OURS.imports + "\nfrom pydantic import BaseModel",
        f"""
class Prompt(BaseModel):
    prompt: str
job = Client().queue(Queue("cold", payload=Prompt)).enqueue(Prompt(**{PAYLOAD}))
assert not job.deduplicated
""",
    ),
    Contestant("outlast, installed without bytecode", OURS.packages, OURS.imports, OURS.work, bytecode=False),
    Contestant("the interpreter alone", (), ""),
)
ASYNC = (
    OURS_ASYNC,
    BARE_ASYNC,
    Contestant(
        "upstash-redis, LPUSH",
        ("upstash-redis",),
        "import asyncio, json\nfrom upstash_redis.asyncio import Redis",
        coroutine(f"""
assert await Redis.from_env().lpush("cold", json.dumps({PAYLOAD}))
"""),
    ),
    Contestant(
        "redis-py, LPUSH",
        ("redis",),
        "import asyncio, json, os\nfrom redis.asyncio import Redis",
        coroutine(f"""
assert await Redis.from_url(os.environ["REDIS_URL"]).lpush("cold", json.dumps({PAYLOAD}))
"""),
    ),
    Contestant(
        "arq",
        PEERS["arq"],
        "import asyncio, os\nfrom arq import create_pool\nfrom arq.connections import RedisSettings",
        coroutine(f"""
pool = await create_pool(RedisSettings.from_dsn(os.environ["REDIS_URL"]))
assert await pool.enqueue_job("run", {PAYLOAD})
"""),
    ),
    Contestant(
        "saq",
        PEERS["saq"],
        "import asyncio, os\nfrom saq import Queue",
        coroutine(f"""
queue = Queue.from_url(os.environ["REDIS_URL"])
await queue.connect()
assert await queue.enqueue("run", payload={PAYLOAD})
"""),
    ),
)

ROUTE = """
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
"""
POST = """
said = []
async def receive():
    return {"type": "http.request", "body": b'{"payload": {"prompt": "first words"}}', "more_body": False}
async def send(message):
    said.append(message)
scope = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "https",
    "path": "/v1/jobs", "raw_path": b"/v1/jobs", "query_string": b"", "root_path": "",
    "headers": [(b"host", b"example.com"), (b"content-type", b"application/json")],
    "client": ("127.0.0.1", 50000), "server": ("example.com", 443)}
"""
ANSWER = coroutine("""
await app(scope, receive, send)
assert said[0]["status"] == 202, said
""")


def bare_app(name: str, packages: tuple[str, ...], imports: str, work: str) -> Contestant:
    """Starlette with one route, which does `work` with the body of the request."""
    route = "".join(f"    {line}\n" for line in work.strip().splitlines())
    app = f"""
async def enqueue(request):
    body = await request.body()
{route}    return JSONResponse({{"status": "waiting"}}, status_code=202)
app = Starlette(routes=[Route("/v1/jobs", enqueue, methods=["POST"])])
"""
    return Contestant(
        name, ("starlette", *packages), f"import asyncio, json, os\n{imports}{ROUTE}", app + POST + ANSWER
    )


BARE_EDGE = bare_app(
    "Starlette and a bare `httpx` post",
    ("httpx",),
    "import httpx",
    """
command = json.dumps(["LPUSH", "cold", body.decode()])
reply = await httpx.AsyncClient().post(os.environ["OUTLAST_REST_URL"], content=command, headers={
    "authorization": "Bearer " + os.environ["OUTLAST_REST_TOKEN"], "content-type": "application/json"})
assert reply.json()["result"]
""",
)
OURS_EDGE = Contestant(
    "**outlast-edge**",
    (CLIENT, EDGE),
    "import asyncio\nfrom outlast import AsyncClient, Queue\nfrom outlast_edge import Edge",
    """
app = Edge(AsyncClient(), queues=[Queue("cold")], authorize=lambda request, action, job: "somebody").app()
"""
    + POST
    + ANSWER,
)
EDGES = (
    OURS_EDGE,
    BARE_EDGE,
    bare_app(
        "Starlette and redis-py, LPUSH",
        ("redis",),
        "from redis.asyncio import Redis",
        """
assert await Redis.from_url(os.environ["REDIS_URL"]).lpush("cold", body)
""",
    ),
)
GROUPS = {
    "A plain function": SYNC,
    "A coroutine": ASYNC,
    "An edge that answers its first POST": EDGES,
}


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """CPU seconds, user and system, of a process from its start to its end; the most memory that it had, in MB."""

    cpu: float
    memory: float

    def least(self, other: Cost) -> Cost:
        return Cost(min(self.cpu, other.cpu), min(self.memory, other.memory))


def cost(program: str, python: Sequence[str | Path], environment: Mapping[str, str]) -> Cost:
    """What a process costs that runs `program`, which must succeed."""
    command = [*python, "-c", program]
    with subprocess.Popen(command, env={"PATH": os.defpath, **environment}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"the program ended with {process.returncode}")
    # Not ru_maxrss: across the exec it remembers the memory of this process.
    return Cost(usage.ru_utime + usage.ru_stime, int(said) * 1024 / 1e6)


def compare(
    programs: Sequence[str], python: Sequence[str | Path], environment: Mapping[str, str], rounds: int
) -> list[float]:
    """The least CPU seconds of each program."""
    for program in programs:  # compiles what is not compiled yet
        cost(program, python, environment)
    times = [[cost(program, python, environment).cpu for program in programs] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


@dataclass(frozen=True)
class Installed:
    """An environment and its size without bytecode."""

    python: Path
    megabytes: float
    versions: dict[str, str]


def install(folder: Path, packages: Sequence[str | Path], *, bytecode: bool) -> Installed:
    """An environment in `folder` with `packages` and what they need, from wheels only."""
    uv = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    python = folder / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--no-project", "--python", sys.executable, folder], check=True)
    if packages:
        compiled = ["--compile-bytecode"] if bytecode else []
        options = ["--quiet", "--only-binary", ":all:", "--link-mode", "copy", *compiled]
        subprocess.run([uv, "pip", "install", *options, "--python", python, *packages], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    files = [path for path in site.glob("*/**/*") if path.is_file() and path.suffix != ".pyc"]
    single = [path for path in site.glob("*.py") if not path.name.startswith("_virtualenv")]
    size = sum(path.stat().st_size for path in (*files, *single))
    versions = (info.name.removesuffix(".dist-info").rpartition("-") for info in site.glob("*.dist-info"))
    return Installed(python, size / 1e6, {name.replace("_", "-"): version for name, _, version in versions})


def wheels(folder: Path) -> dict[str, Path]:
    """Our own wheels by import name."""
    for member in ("client", "edge"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=ROOT / member, check=True, capture_output=True)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@contextmanager
def tls_front(url: str, certificate: Path) -> Iterator[str]:
    """An address like `url`, of the same scheme with an s, that leads to it through TLS."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    ready: queue.Queue[tuple[int, Callable[[], object]]] = queue.Queue()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # a process that has its answer ends without good-bye
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            ready.put((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(over.set)))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    listening, stop = ready.get()
    try:
        yield f"{scheme}s://localhost:{listening}"
    finally:
        stop()
        thread.join()


def certificates(folder: Path) -> Path:
    """Make `server.pem` for localhost in `folder`; the file of all authorities, the usual ones and that of it."""
    import certifi
    import trustme

    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    trusted = folder / "trusted.pem"
    trusted.write_bytes(Path(certifi.where()).read_bytes() + authority.cert_pem.bytes())
    return trusted


@contextmanager
def database(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a function that has a database behind TLS, over REST and over TCP."""
    from tests.servers import start_valkey

    from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

    authorities = certificates(folder)
    with start_valkey() as server:
        url = f"redis://{server.host}:{server.port}"
        config = GatewayConfig(databases=[Database(redis_url=url, token=TOKEN)])
        with (
            GatewayServer(config) as gateway,
            tls_front(gateway.url, folder / "server.pem") as rest,
            tls_front(url, folder / "server.pem") as tcp,
        ):
            yield {
                "OUTLAST_REST_URL": rest,
                "OUTLAST_REST_TOKEN": TOKEN,
                "UPSTASH_REDIS_REST_URL": rest,
                "UPSTASH_REDIS_REST_TOKEN": TOKEN,
                "REDIS_URL": tcp,
                "SSL_CERT_FILE": str(authorities),
            }


@dataclass(frozen=True)
class Result:
    imported: Cost
    answered: Cost
    installed: Installed


def measure(contestants: Sequence[Contestant], rounds: int) -> dict[Contestant, Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = wheels(folder)
        homes: dict[tuple[tuple[str, ...], bool], Installed] = {}
        for one in contestants:
            if (key := (one.packages, one.bytecode)) not in homes:
                packages = [ours.get(package, package) for package in one.packages]
                homes[key] = install(folder / f"home{len(homes)}", packages, bytecode=one.bytecode)
        found: dict[Contestant, Result] = {}
        with database(folder) as environment:
            turns = list(contestants)
            for _ in range(1 + rounds):
                random.shuffle(turns)
                for one in turns:
                    home = homes[one.packages, one.bytecode]
                    python = [home.python, *([] if one.bytecode else ["-B"])]
                    imported, answered = (cost(part, python, environment) for part in (one.importing, one.program))
                    if (before := found.get(one)) is not None:
                        imported, answered = before.imported.least(imported), before.answered.least(answered)
                    found[one] = Result(imported, answered, home)
    return found


# -- telling ---------------------------------------------------------------------------------------------------------


def cell(value: float, ours: float, unit: str) -> str:
    shown = f"{value:.1f}" if value < 10 else f"{value:.0f}"
    return f"**{value / ours:.2f}** · {shown} {unit}"


def table(contestants: Sequence[Contestant], found: Mapping[Contestant, Result]) -> list[str]:
    lines = [
        "| | CPU until the first answer | CPU of the import | peak memory | installed | packages |",
        "|---|---|---|---|---|---|",
    ]
    ours = found[contestants[0]]
    for one in contestants:
        its = found[one]
        cells = [
            cell(its.answered.cpu * 1e3, ours.answered.cpu * 1e3, "ms") if one.work else "–",
            cell(its.imported.cpu * 1e3, ours.imported.cpu * 1e3, "ms"),
            cell((its.answered if one.work else its.imported).memory, ours.answered.memory, "MB"),
            cell(its.installed.megabytes, ours.installed.megabytes, "MB") if one.packages else "–",
            str(len(its.installed.versions)),
        ]
        lines.append(f"| {one.name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="put the table into docs/cold-start.md")
    options = parser.parse_args()
    found = measure([one for group in GROUPS.values() for one in group], options.rounds)
    sections = [line for title, group in GROUPS.items() for line in (f"## {title}", "", *table(group, found), "")]

    from benchmarks.__main__ import machine

    peers = {
        f"{name} {its.installed.versions[name]}"
        for one, its in found.items()
        for name in (re.split(r"[\[=]", package)[0] for package in one.packages[:1])
        if name != CLIENT
    }
    how = f"The least of {options.rounds + 1} rounds, {machine()}; {', '.join(sorted(peers))}."
    text = "\n".join([*sections, how])
    print(text)
    if options.write:
        head, mark, _ = DOCUMENT.read_text().partition(MARK)
        DOCUMENT.write_text(f"{head}{mark}\n{text}\n")


if __name__ == "__main__":
    main()
