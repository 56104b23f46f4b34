"""Signatures as the Standard Webhooks specification has them: HMAC-SHA256 over ``id.timestamp.body``."""

from __future__ import annotations

import hmac
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence

from outlast.errors import ConfigurationError

__all__ = ["new_secret", "sign"]

_PREFIX = "whsec_"


def new_secret() -> str:
    """A fresh signing secret, ``whsec_…``: give it to the receiver and to `Webhooks`."""
    return _PREFIX + b64encode(os.urandom(32)).decode()


def key_of(secret: str) -> bytes:
    """The key of a secret. Raises ConfigurationError, which does not quote it."""
    try:
        if not secret.startswith(_PREFIX):
            raise ValueError
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (ValueError, AttributeError):
        raise ConfigurationError("a webhook secret is not whsec_ and base64; new_secret() makes one") from None
    if not 24 <= len(key) <= 64:
        raise ConfigurationError(f"a webhook secret has {len(key)} bytes; 24 to 64 are safe: new_secret() makes one")
    return key


def sign(secrets: Sequence[str], id: str, timestamp: int, body: bytes) -> str:
    """The value of the header ``webhook-signature``: one signature for each secret.

    During a rotation that is the old and the new one; a receiver accepts the message if any of them is right.
    """
    text = b"%b.%d.%b" % (id.encode(), timestamp, body)
    signatures = [b64encode(hmac.digest(key_of(secret), text, "sha256")).decode() for secret in secrets]
    return " ".join(f"v1,{signature}" for signature in signatures)
