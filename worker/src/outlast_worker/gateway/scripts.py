"""Makes Upstash's script flags work on servers that refuse them.

`#!lua flags=allow-key-locking` tells Upstash to lock the script's keys instead of the whole database; Valkey and
Redis answer "Unexpected flag". So the flag is taken out of what is sent, which changes the digest, and the digest
that the caller knows is translated. The translation outlives SCRIPT FLUSH (what it names is simply gone, and the
answer is NOSCRIPT, as there) and is learnt again from the EVAL that follows.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

UPSTASH_FLAGS = frozenset({b"allow-key-locking"})
REMEMBERED = 10_000


def digest(body: bytes) -> bytes:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()


def strip_flags(body: bytes) -> bytes:
    """The script without the flags that only Upstash knows; line numbers stay."""
    if not body.startswith(b"#!"):
        return body
    first, newline, rest = body.partition(b"\n")
    words: list[bytes] = []
    for word in first.split():
        if word.startswith(b"flags="):
            flags = [f for f in word[6:].split(b",") if f not in UPSTASH_FLAGS]
            if not flags:
                continue
            word = b"flags=" + b",".join(flags)
        words.append(word)
    return b" ".join(words) + newline + rest


class Scripts:
    """The digests that one database's callers know and its server does not."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    def body(self, body: bytes) -> bytes:
        """The body to send instead of `body`, whose digest is remembered if the two differ."""
        if not body.startswith(b"#!"):
            return body
        sent = strip_flags(body)
        if sent != body:
            self._known[digest(body)] = digest(sent)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return sent

    def sha(self, sha: bytes) -> bytes:
        """The digest that the server has for the caller's `sha`."""
        return self._known.get(sha.lower(), sha)

    def translate(self, name: str, args: Sequence[bytes]) -> list[bytes]:
        """The command to send for one of EVAL, EVALSHA (also _RO) and SCRIPT."""
        out = list(args)
        if name in ("EVALSHA", "EVALSHA_RO") and len(args) > 1:
            out[1] = self.sha(args[1])
        elif name in ("EVAL", "EVAL_RO") and len(args) > 1:
            out[1] = self.body(args[1])
        elif name == "SCRIPT" and len(args) > 2:
            subcommand = args[1].upper()
            if subcommand == b"LOAD":
                out[2] = self.body(args[2])
            elif subcommand == b"EXISTS":
                out[2:] = [self.sha(sha) for sha in args[2:]]
        return out
