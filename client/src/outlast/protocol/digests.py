"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "admit": "77dee635716c9eee7d1b7ac65968cb40c8d71e77",
    "cancel": "66c26d37ffe590e667f97712cc2419a1c2f80fc8",
    "enqueue": "70f201500710c95f9c72ae6b3f5b118c7f80e3e0",
    "flush": "f8ff0b2cbffc3d4e1cd9fcb99a49f46c9bf47a6b",
    "prune_dead": "b4a518bfcf2cc5130fde04561a1d32449bde35fd",
    "purge_dead": "c4fe335e655b5cdef11c2cf12493cbdb92c49d71",
    "release": "2cda24a4f5a1364f9c299405044ff532db5b803e",
    "renew": "3959fe82204455c444abd8a9f14bb1a36dfd14d9",
    "reserve": "a92f111572eb24a968176e503f1445725a064b63",
    "retry": "44c1d64e7b6318c2d1c22f18638fab7855c1011a",
    "retry_dead": "163b186e023ba4db81f5f207589e5dd30660373f",
    "settle": "b290c2d794150b1541ed418352b335c32dc1e8bd",
    "step": "18b84eb3a5dbbfa39be5d26655c4197f601c91bd",
}
