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


def test_wheels_stay_small(wheels: dict[str, zipfile.ZipFile]) -> None:
    """Bytes as downloaded. A cold function pays for each of them."""
    sizes = {name: sum(entry.compress_size for entry in wheel.infolist()) for name, wheel in wheels.items()}
    assert sizes["outlast"] < 90_000, sizes
    assert sizes["outlast_edge"] < 110_000, sizes
    assert sizes["outlast_worker"] < 180_000, sizes
