"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "d149b8b81bd5d8eecf7672f0c72ca2523e7f2ed6",
    "enqueue": "c02ca15bd052d58c903bbd26d45245f355347b34",
    "flush": "a3ad1f4ea0d1a829c2de62a465e5de8f96755ba4",
    "prune_dead": "ec588a72130253a69f9b5590c07bd72b3df690d1",
    "release": "2d22cac8274a10f89d0da9ce18c5149aff14dbf6",
    "renew": "c32398046bc10d1216991023d5cf187802f92522",
    "reserve": "3b9f3746d27068022ec0a22ab218063f5b97a034",
    "retry": "0a522262398be192d0b09dc78c5ac8beb9899a9f",
    "retry_dead": "2b6d1f631d05746253d2b8b8770aa9cbcddd58c1",
    "settle": "85368349164d1c1ff1d56efe8c5186ed235cbc16",
}
