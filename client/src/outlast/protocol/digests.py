"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "admit": "5447edda4864c8b1fa8998f93cb22567902d3723",
    "cancel": "0805c4174c34b4ed8b83d9f98c54392d355082f1",
    "enqueue": "e9a95aad38016a6778584ac1d8eb8ccbad3f58d4",
    "flush": "a22ec203be5f747809db59b9b634d67d348c3372",
    "prune_dead": "d8e12dab70790333ade671eab081663bd019f431",
    "purge_dead": "a6f86336d23254c35016170f1870a30f8923e139",
    "release": "24f61d1f1cdfbc343f30910bd3159e1d946e3df6",
    "renew": "3369fcc0bffde71711f2898a5611b580f8ef693b",
    "reserve": "76e3cce106f46189930d4b72b9a3ffb0547fd6de",
    "retry": "159469fe5ef5c99a3d5ccf1789c91ae23b480d30",
    "retry_dead": "1ca17d35071b7d599ff74053b23088626112cee7",
    "settle": "34a2355db2384281e14e3c7d6dcaac1f3c5475e4",
    "step": "5803c85a15dd4992f49bfa89fc1b296bce1a1d95",
}
