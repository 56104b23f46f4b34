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

    def __init__(self, name: str, keys: str, argv: str, *, locks_keys: bool = False) -> None:
        """`locks_keys`: it touches the keys that it is given and no other, so Upstash need not stop for it."""
        self.name = name
        self.keys = keys.split()
        self.argv = argv.split()
        self.sha = DIGESTS[name]
        self.locks_keys = locks_keys
        SCRIPTS[name] = self

    @cached_property
    def source(self) -> str:
        return load(self.name)

    @cached_property
    def locking_source(self) -> str:
        """With Upstash's flag, which other servers refuse: without it a script locks the whole database there."""
        return "#!lua flags=allow-key-locking\n" + self.source

    @cached_property
    def locking_sha(self) -> str:
        return sha1(self.locking_source.encode()).hexdigest()

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
