"""What is public, that both clients have the same of it, and what importing it loads and installing it brings."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.metadata import requires
from types import ModuleType
from typing import Any

import pytest

import outlast
from outlast import aio, client, errors, job, records

PAIRS = [(client.Client, aio.AsyncClient), (client.Jobs, aio.AsyncJobs)]
RENAMED = {"close": "aclose", "__enter__": "__aenter__", "__exit__": "__aexit__"}


def methods(class_: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(class_).items()
        if inspect.isfunction(value) or isinstance(value, (property, classmethod))
    }


def as_sync(text: str) -> str:
    """A signature of the async client in the words of the plain one."""
    text = text.replace("AsyncGenerator[Event[R], None]", "Generator[Event[R], None, None]")
    text = text.replace("upstash_redis.asyncio", "upstash_redis")
    return re.sub(r"\bAsync(?=Client|Jobs|Transport)", "", text)


@pytest.mark.parametrize(("plain", "other"), PAIRS, ids=["Client", "Jobs"])
def test_both_clients_have_the_same_names_parameters_defaults_and_docstrings(plain: type, other: type) -> None:
    ours, theirs = methods(plain), methods(other)
    assert {RENAMED.get(name, name) for name in ours} == set(theirs)
    assert as_sync(other.__doc__ or "") == (plain.__doc__ or "")
    for name, method in ours.items():
        twin = theirs[RENAMED.get(name, name)]
        assert type(method) is type(twin)
        assert as_sync(inspect.getdoc(twin) or "") == (inspect.getdoc(method) or ""), name
        for one, two in ((method, twin),):
            one = getattr(one, "__func__", getattr(one, "fget", one))
            two = getattr(two, "__func__", getattr(two, "fget", two))
            assert as_sync(str(inspect.signature(two))) == str(inspect.signature(one)), name


@pytest.mark.parametrize("class_", [client.Client, client.Jobs])
def test_every_public_method_says_what_it_gives(class_: type) -> None:
    for name, method in methods(class_).items():
        assert name.startswith("_") or inspect.getdoc(method), name


def test_the_exported_names_exist_and_are_all_there_is() -> None:
    assert outlast.__all__ == sorted(outlast.__all__)
    assert set(outlast.__all__) <= set(dir(outlast))
    for name in outlast.__all__:
        assert getattr(outlast, name) is not None
    public = {
        name
        for name, value in vars(outlast).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in ("annotations", "TYPE_CHECKING", "Any")
    }
    assert public == set(outlast.__all__)
    assert set(errors.__all__) <= set(outlast.__all__)
    assert {*records.__all__, *job.__all__} - {"TERMINAL"} <= set(outlast.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = outlast.nothing_of_the_kind


def test_the_tree_in_the_docstring_of_errors_is_the_tree() -> None:
    drawn = re.findall(r"^ +(?:[│├└─ ]*)([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    assert set(drawn) == set(errors.__all__)
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, outlast.OutlastError) or name == "JobStopped"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_neither_httpx_nor_pydantic_and_a_queue_does_not_either() -> None:
    code = """
import sys, outlast
outlast.Queue("a"), outlast.Queue("b", payload=dict, result=str)
outlast.Client().queue(outlast.Queue("c"))
import outlast.rest, outlast.upstash
print(sorted(set(sys.modules) & {"httpx", "pydantic", "upstash_redis", "redis", "anyio", "ssl", "typing_extensions"}))
"""
    assert run(code) == "[]"


def test_the_client_installs_at_most_eleven_other_distributions() -> None:
    from packaging.requirements import Requirement

    found: set[str] = set()
    todo = ["outlast"]
    while todo:
        for text in requires(todo.pop()) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                name = re.sub(r"[-_.]+", "-", requirement.name).lower()
                if name not in found:
                    found.add(name)
                    todo.append(name)
    assert {"httpx", "pydantic"} <= found
    assert len(found) <= 11, sorted(found)
