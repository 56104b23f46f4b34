"""A key and a self-signed certificate for `localhost`, made from nothing: the standard library can use them, not make
them, and a private key is not for a repository."""

from __future__ import annotations

import base64
import hashlib
import secrets
from datetime import UTC, datetime, timedelta

SMALL_PRIMES = [n for n in range(3, 2000, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2))]
SHA256_RSA, RSA = bytes.fromhex("2a864886f70d01010b"), bytes.fromhex("2a864886f70d010101")


def _prime(bits: int) -> int:
    while True:
        n = secrets.randbits(bits) | (3 << (bits - 2)) | 1
        # A Fermat test to four bases: wrong about a random number of this size far less often than memory is.
        if all(n % p for p in SMALL_PRIMES) and all(pow(base, n - 1, n) == 1 for base in (2, 3, 5, 7)):
            return n


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag]) + (bytes([len(body)]) if len(body) < 128 else bytes([0x80 | len(size)]) + size) + body


def _integer(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _extension(oid: str, value: bytes, *, critical: bool = False) -> bytes:
    flag = _der(0x01, b"\xff") if critical else b""
    return _der(0x30, _der(0x06, bytes.fromhex(oid)), flag, _der(0x04, value))


def _pem(label: str, der: bytes) -> str:
    return f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode()}-----END {label}-----\n"


def certificate_and_key(name: str = "localhost") -> str:
    """Both as PEM, good for a day."""
    e = 65537
    p, q = _prime(1024), _prime(1024)
    n, d = p * q, pow(e, -1, (p - 1) * (q - 1))
    key = _der(0x30, *map(_integer, (0, n, e, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p))))
    public = _der(0x30, _integer(n), _integer(e))
    algorithm = _der(0x30, _der(0x06, SHA256_RSA), b"\x05\x00")
    subject = _der(0x30, _der(0x31, _der(0x30, _der(0x06, bytes.fromhex("550403")), _der(0x0C, name.encode()))))
    now = datetime.now(UTC)
    times = [(now + timedelta(days=days)).strftime("%y%m%d%H%M%SZ").encode() for days in (-1, 1)]
    extensions = [
        _extension("551d13", _der(0x30, _der(0x01, b"\xff")), critical=True),  # may sign: it is its own authority
        _extension("551d0f", bytes.fromhex("03020284"), critical=True),  # digitalSignature, keyCertSign
        _extension("551d0e", _der(0x04, hashlib.sha1(public).digest())),
        _extension("551d11", _der(0x30, _der(0x82, name.encode()))),
    ]
    content = _der(
        0x30,
        _der(0xA0, _integer(2)),
        _integer(secrets.randbits(63)),
        algorithm,
        subject,
        _der(0x30, *[_der(0x17, time) for time in times]),
        subject,
        _der(0x30, _der(0x30, _der(0x06, RSA), b"\x05\x00"), _der(0x03, b"\x00", public)),
        _der(0xA3, _der(0x30, *extensions)),
    )
    digest = _der(
        0x30,
        _der(0x30, _der(0x06, bytes.fromhex("608648016503040201")), b"\x05\x00"),
        _der(0x04, hashlib.sha256(content).digest()),
    )
    padded = b"\x00\x01" + b"\xff" * (256 - 3 - len(digest)) + b"\x00" + digest
    signature = pow(int.from_bytes(padded, "big"), d, n).to_bytes(256, "big")
    certificate = _der(0x30, content, algorithm, _der(0x03, b"\x00", signature))
    return _pem("RSA PRIVATE KEY", key) + _pem("CERTIFICATE", certificate)
