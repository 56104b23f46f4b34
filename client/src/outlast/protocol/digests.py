"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "f68054db3c3f24c9a210d4a5c7173080f5cf5bef",
    "enqueue": "3434828fa070ff779169a52f13b2b17e4132e1d3",
    "flush": "749241aa63c7638027edcfdfce9a4d0793f20314",
    "prune_dead": "f520c5128883c34f8ed7d9dce03073d8024b7386",
    "release": "e7bf37748feb76dda7a6810ef7ccf5111bb17c5e",
    "renew": "73f664cab43b78a5465e42611d34c0a38145c8c6",
    "reserve": "181091e4e7d869391a554061504864a57c1a6ef7",
    "retry": "2ed7026a049b52457af8dc7248b100a749434f34",
    "retry_dead": "4f5be22a744494307223062e65900338de4b4d12",
    "settle": "41c982c5933450827f2d454836a7ff6c13772ed1",
    "step": "28c514daa0651af6f2b72ef2481de98bad90b4e0",
}
