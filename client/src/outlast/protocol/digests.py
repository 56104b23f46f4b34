"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "admit": "adaa9276f67f62b462b56bdc2822c92c15b36f3c",
    "cancel": "ef8b57ea7c9a18c25664992a5a000810f41acecc",
    "enqueue": "79267a2f4a7eb1b06f255bfb2bbd6a4b06ae5d5c",
    "flush": "6fb6c9e391320c0a584fd494aed6aa8d3faed8cc",
    "prune_dead": "83d95ffa7798ab9997657dffcd24e013bbb48f91",
    "purge_dead": "31465e4d790558c446c393518b9312f06830e8d8",
    "release": "79bdf46eb387d323ed85252b7fff2a5dd41a1bf1",
    "renew": "bc30f81a3d93c03902b05fabd18474378c3800a6",
    "reserve": "8e37961ce3f0354489c1c3633b41292dc49cbf32",
    "retry": "9010e2f02ffd16bd14e296aab302e556ec511976",
    "retry_dead": "a01ac726e04b2ed9416215f9b0bc5bd488e8c727",
    "settle": "49aa8da3e86a1ce06765d7b7e10097178b4878d8",
    "step": "6c93c8b95e5cbbeb47fc7e56102cb89eac61957d",
}
