"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "9eca787b4a5d61ee2c3b0920917c22d406021aa6",
    "enqueue": "4819d8db7e9e358d966aa0535f5d0f570b34936d",
    "flush": "b66dc38915335665b290a3bdccbc8211171c62b6",
    "prune_dead": "d4e993e481c72543484323b85d1aac021b8c32a8",
    "release": "4e6bd3a4a9edd477c02c628709fc50ba33e7fee0",
    "renew": "db027be17887a5d6d0f0ed455f71ed74c1257d32",
    "reserve": "6556aad3c1cf2b42a1155f06ca65c5d610ae5fa5",
    "retry": "908f9510fa84015755214a01d335947748394ced",
    "retry_dead": "8d307fb46fb6c46a6ccad759e34f67d2beaae5d5",
    "settle": "14ac4fb1dd595e1787d4ce5d49ebe6968af4d9ac",
}
