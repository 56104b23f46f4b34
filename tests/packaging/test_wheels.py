"""The built files: what a user installs is complete, small, and of one version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = {"client": "outlast", "worker": "outlast_worker", "edge": "outlast_edge"}


def project(member: str) -> dict[str, object]:
    data = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(data, dict)
    return data


def test_the_three_distributions_have_one_version_and_pin_each_other() -> None:
    import outlast

    versions = {str(project(member)["version"]) for member in MEMBERS}
    assert versions == {outlast.__version__}
    [version] = versions
    for member in MEMBERS:
        text = (ROOT / member / "pyproject.toml").read_text(encoding="utf-8")
        for other in ("outlast", "outlast-worker", "outlast-edge"):
            for line in text.splitlines():
                if f'"{other}==' in line or f'"{other}>' in line or f'"{other}<' in line:
                    assert f'"{other}=={version}"' in line, line


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    target = tmp_path_factory.mktemp("wheels")
    for member in MEMBERS:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
            cwd=ROOT / member,
            check=True,
            capture_output=True,
        )
    return {name: zipfile.ZipFile(next(target.glob(f"{name}-*.whl"))) for name in MEMBERS.values()}


def test_wheels_hold_every_file_of_the_source(wheels: dict[str, zipfile.ZipFile]) -> None:
    for member, name in MEMBERS.items():
        source = ROOT / member / "src"
        expected = {
            path.relative_to(source).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        packed = {entry for entry in wheels[name].namelist() if ".dist-info/" not in entry}
        assert packed == expected
        assert f"{name}/py.typed" in packed
    assert any(entry.endswith(".lua") for entry in wheels["outlast"].namelist())


def test_wheels_bring_the_license_and_a_page_of_their_own(wheels: dict[str, zipfile.ZipFile]) -> None:
    license = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for name, wheel in wheels.items():
        info = next(entry.partition("/")[0] for entry in wheel.namelist() if ".dist-info/" in entry)
        assert wheel.read(f"{info}/licenses/LICENSE").decode() == license, name
        assert "a job queue" in wheel.read(f"{info}/METADATA").decode().partition("\n\n")[2], name


def test_wheels_stay_small(wheels: dict[str, zipfile.ZipFile]) -> None:
    """Bytes as downloaded. A cold function pays for each of them."""
    sizes = {name: sum(entry.compress_size for entry in wheel.infolist()) for name, wheel in wheels.items()}
    assert sizes["outlast"] < 115_000, sizes
    assert sizes["outlast_edge"] < 110_000, sizes
    assert sizes["outlast_worker"] < 190_000, sizes


def test_python_m_outlast_says_what_is_installed() -> None:
    done = subprocess.run([sys.executable, "-m", "outlast"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"outlast", "outlast-worker", "outlast-edge", "httpx", "pydantic", "redis", "python"} <= names


def test_the_wheels_install_alone_and_work(wheels: dict[str, zipfile.ZipFile], tmp_path: Path, valkey_url: str) -> None:
    """From the built files, in a folder of their own: the client without the worker, then a whole loop."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    wheels["outlast"].extractall(alone)
    for wheel in wheels.values():
        wheel.extractall(together)

    def run(folder: Path, code: str) -> str:
        # -I and our own folder first: nothing of the working tree, only what the wheels brought.
        program = f"import sys; sys.path.insert(0, {str(folder)!r})\nsys.meta_path = [f for f in sys.meta_path "
        program += "if 'editable' not in repr(f).lower()]\n" + code
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(alone, "import outlast.client, outlast.rest; print(outlast.__file__)").startswith(str(alone))
    loop = f"""
import asyncio, outlast, outlast_edge, outlast_worker
from outlast import Client, Queue
queue = Queue("wheels")
worker = outlast_worker.Worker({valkey_url!r})
@worker.handles(queue)
async def run(job): return job.payload * 2
with Client(redis_url={valkey_url!r}) as client:
    job = client.queue(queue).enqueue(21)
    worker.run(burst=True)
    print(client.queue(queue).wait(job.id), outlast.__file__.startswith({str(together)!r}))
"""
    assert run(together, loop) == "42 True"
