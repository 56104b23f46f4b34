"""Watch tokens: a signed right to read one job for some time, for viewers that cannot send a header."""

from __future__ import annotations

import base64
import hmac
import re
import time
from collections.abc import Sequence

from ._http import Problem

__all__ = ["check_token", "make_token"]

_TOKEN = re.compile(r"w1\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")


def make_token(secret: bytes, queue: str, id: str, seconds: float) -> str:
    """A token for the job, valid for `seconds` from now."""
    expires = str(int(time.time() + seconds))
    return f"w1.{expires}.{_sign(secret, queue, id, expires)}"


def check_token(secrets: Sequence[bytes], queue: str, id: str, token: str) -> None:
    """Raise a Problem unless the token is for this job, signed with one of `secrets`, and still valid."""
    found = _TOKEN.fullmatch(token)
    if found is None or not any(hmac.compare_digest(_sign(s, queue, id, found[1]), found[2]) for s in secrets):
        raise Problem(403, "bad_token", "The token is not valid for this job.")
    if time.time() >= int(found[1]):
        raise Problem(403, "token_expired", "The token has expired; ask for a new one.")


def _sign(secret: bytes, queue: str, id: str, expires: str) -> str:
    # Lengths first: no pair of queue and id can be spelled as another.
    text = f"outlast-watch {len(queue)} {len(id)} {expires} {queue}{id}"
    return base64.urlsafe_b64encode(hmac.digest(secret, text.encode(), "sha256")).rstrip(b"=").decode()
