"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "cancel": "ae787af44f48a46d54389733270bf4f1abc1543a",
    "enqueue": "53597e192ed9397040de3c2619155f7120fd9b28",
    "flush": "a5fa1b066d0b9e16c73c9703c1dad8b662659b54",
    "prune_dead": "528887389344c0dec0624d843e18060638194c00",
    "release": "6a6ae6dc63aa020044484675c3279c56ff1bd224",
    "renew": "7305b08bd67bc226bdc4e3db1ab424e9597231a5",
    "reserve": "ecbfb9a2f6cc9a6fbf48255e4fa81aca93573d84",
    "retry": "df8917f80dca5a7946a1e7e96022e8c6fde952d0",
    "retry_dead": "036fd7f91f3016570ebae398335ffaf25c2cfb1f",
    "settle": "1ed727fffffe265fc27cebb5cb0e956b6bc7f865",
    "step": "287418ebbacd331175d358777513aa04694539ad",
}
