"""The Lua scripts: their names, what they take, and their text, read only when a server does not know them yet."""

from __future__ import annotations

from functools import cached_property
from hashlib import sha1
from os.path import dirname, join

from .digests import DIGESTS

__all__ = ["SCRIPTS", "Script"]


class Script:
    """One transition. `keys` and `argv` repeat the file's header, word for word: a test compares them.

    A name that ends in ``?`` is given only when used; one that ends in ``...`` may repeat.
    """

    def __init__(self, name: str, keys: str, argv: str) -> None:
        self.name = name
        self.keys = keys.split()
        self.argv = argv.split()
        self.sha = DIGESTS[name]
        SCRIPTS[name] = self

    @cached_property
    def source(self) -> str:
        return load(self.name)

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


SCRIPTS: dict[str, Script] = {}


def _read(name: str) -> str:
    # open() by path costs a tenth of importlib.resources, and a cold function pays for every millisecond.
    with open(join(dirname(__file__), "lua", name + ".lua"), encoding="utf-8") as file:
        return file.read()


def load(name: str) -> str:
    """The text of a script as the server gets it: the prelude, then the file."""
    return _read("_prelude") + _read(name)


def digest(name: str) -> str:
    return sha1(load(name).encode()).hexdigest()
