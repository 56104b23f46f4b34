"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "e6adbd020cf1ee18223cbc20643eb40ab805717b",
    "enqueue": "d1d4cc2d90ba18b0b4a5a111b823c3026c560ec0",
    "flush": "1816a0dd993c99ec903ad742177db4603b8a5b61",
    "prune_dead": "f568ff966818637cea00e7da8fc0b8a4bcf20ea9",
    "release": "71d08318eaa7260ab07211a08062ce189854ef3e",
    "renew": "d26f239b1f59fca71649e23eda48a5c7c117a3b8",
    "reserve": "9eefa0f8746e26191777b6fda38ff563d22a0d12",
    "retry": "e740f40f619612ce19a690598745b114eaede9f3",
    "retry_dead": "08f159095e495c54b1ca93a1b5fa4f8c2b4485c9",
    "settle": "eb30ee720dbfbfdd0afbbcaadce4a6b9d1d05d93",
}
