"""Signatures that two independent verifiers accept: the standardwebhooks package and the OpenAI SDK."""

from __future__ import annotations

import json
import time
from base64 import b64encode

import openai
import pytest
import standardwebhooks

from outlast import ConfigurationError
from outlast_worker.webhooks import Webhooks, new_secret
from outlast_worker.webhooks.signing import sign

BODY = json.dumps({"type": "job.completed", "timestamp": "2026-11-30T00:00:00Z", "data": {"id": "é"}}).encode()


def headers(*secrets: str, at: int | None = None, id: str = "msg_1") -> dict[str, str]:
    now = int(time.time()) if at is None else at
    return {"webhook-id": id, "webhook-timestamp": str(now), "webhook-signature": sign(secrets, id, now, BODY)}


def test_the_specifications_example() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signature = sign([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_standardwebhooks_package_accepts_it() -> None:
    secret = new_secret()
    verifier = standardwebhooks.Webhook(secret)
    assert verifier.verify(BODY, headers(secret))["type"] == "job.completed"
    for wrong in (headers(new_secret()), {**headers(secret), "webhook-id": "msg_2"}, headers(secret, at=1)):
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            verifier.verify(BODY, wrong)


def test_the_openai_sdk_accepts_it() -> None:
    secret = new_secret()
    client = openai.OpenAI(api_key="unused", webhook_secret=secret)
    client.webhooks.verify_signature(BODY, headers(secret))
    assert client.webhooks.unwrap(BODY, headers(secret)).type == "job.completed"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(BODY, headers(new_secret()))


def test_during_a_rotation_both_secrets_work() -> None:
    old, new = new_secret(), new_secret()
    sent = headers(old, new)
    for secret in (old, new):
        standardwebhooks.Webhook(secret).verify(BODY, sent)
        openai.OpenAI(api_key="unused", webhook_secret=secret).webhooks.verify_signature(BODY, sent)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "plain",
        "whsec_",
        "whsec_!!!",
        "whsec_" + b64encode(b"x" * 23).decode(),
        "whsec_" + b64encode(b"x" * 65).decode(),
    ],
)
def test_a_weak_or_malformed_secret_is_refused_and_not_quoted(secret: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Webhooks([secret])
    assert not secret or secret not in str(refused.value)


def test_no_secret_at_all_is_refused() -> None:
    for nothing in ([], "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"):
        with pytest.raises(ConfigurationError):
            Webhooks(nothing)


def test_secrets_show_in_no_repr() -> None:
    secret = new_secret()
    assert secret not in repr(Webhooks([secret]))
