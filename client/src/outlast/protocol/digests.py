"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "80d70ee4218a48868b65a9b5f521e51d4601041a",
    "enqueue": "a8fed8ef5d07ab5f7a11fe098275944bd8aa99f4",
    "flush": "0e8309dab25b4698c2d201c04fde801eef85998d",
    "prune_dead": "26568b66799b8f91b3f628986f95e6391a0ffff9",
    "release": "f336ce7844580601820fb0a0e6ff18140cb2d265",
    "renew": "ae9d75d2e14c62dca522645f47bcf3128aa6dab0",
    "reserve": "17c33c5f891d7b2dd4523994c32352617e4ad1e4",
    "retry": "3d4286317c08c18f9d17a921f17e5ca8fb9c8a74",
    "retry_dead": "f0755989d9a9005b2996fd3dd3ff2d0bba970486",
    "settle": "2e9247b656d6e5f4cb7c264ac6088e774531f101",
    "step": "c83d603e8a7badeed194ec3c0511ea1d6b4a41ea",
}
