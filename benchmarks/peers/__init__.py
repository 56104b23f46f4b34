"""Other queues on the same work. Each module runs in an environment of its own, with the version named here."""

PEERS = {
    "saq": ("saq[redis]==0.26.4", "typing_extensions"),
    "streaq": ("streaq==7.2.0",),
    "taskiq": ("taskiq-redis==1.2.4", "taskiq==0.13.0"),
    "bullmq": ("bullmq==3.4.4",),
    "arq": ("arq==0.28.0",),
}
