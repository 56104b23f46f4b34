"""The key table. All keys of a queue share the hash tag ``{name}``: one slot of a cluster, one script can hold them."""

from __future__ import annotations

__all__ = ["BATCH", "KEY_TABLE", "LARGE", "LATER", "RANK", "Keys"]

RANK = 10**13
"""Width of a priority's band in `ready`: far more than `seq` can count."""
BATCH = 100
"""What one call promotes, reclaims, takes or prunes at most. A call that did so many asks to be called again."""

LATER = 1000
"""Ms after a due time that another worker waits for: by then it has come, or is dead."""
LARGE = 16_384
"""Bytes of a payload from which on enqueue looks up the queue's limit: below, that would cost more than it saves."""

KEY_TABLE = (
    # name, type, holds, lives
    ("ready", "zset", "ids that can run; score (9 - priority) * 1e13 + seq", "always"),
    ("scheduled", "zset", "ids that wait for a time; score due time in ms", "always"),
    (
        "leases",
        "zset",
        "ids that a worker owns; score lease expiry in ms, with a fraction once found lapsed",
        "always",
    ),
    (
        "dead",
        "zset",
        "ids that failed for good; score time of death in ms",
        "always; pruned with their records",
    ),
    ("seq", "string", "the counter behind the order within a priority", "always"),
    ("signal", "list", "the doorbell: hints for blocked workers, at most 1,000", "always"),
    ("job:<id>", "hash", "the record", "result_ttl or dead_ttl after the end"),
    ("events:<id>", "stream", "the output; fields t, d, a", "as the record"),
    ("steps:<id>", "hash", "values of finished steps; gen, the life they belong to", "30 days; then as the record"),
    (
        "idem:<key>",
        "string",
        "the id of the job that holds the idempotency key",
        "idempotency_ttl after completion",
    ),
    ("config", "hash", "rules of the queue, its pauses, and when its rate allows the next start", "always"),
    ("room", "list", "wakes workers that wait for a limit; at most one token", "always"),
    ("owner:<owner>", "zset", "under a cap: what runs at -(time of take), what is held back at its rank", "7 days"),
    ("usage:<day>", "hash", "what the queue's jobs used on a day (UTC), by counter", "400 days"),
    ("schedules", "hash", "last:<name>, when a schedule was due last; spec:<name>, its rule", "always"),
    ("workers", "hash", "worker id to when and where it was last seen", "pruned by readers"),
    (
        "take:<worker>",
        "string",
        "what the worker's latest reserve took, for a repeat; at <worker>+1 for a second one under way",
        "2 x lease",
    ),
    (
        "watch",
        "string",
        "the worker that waits for the next time in `scheduled`, and that time in ms",
        "a second longer",
    ),
    ("ctl:<worker>", "list", "cancels pushed to a worker", "10 minutes"),
    ("absent", "none", "nothing: scripts that find keys by themselves name it, see `Keys.absent`", "never is"),
    ("hooks:<key>", "any", "the delivery queue of webhooks: each of these keys once more", "as that key"),
)


class Keys:
    """The keys of one queue. `name` is the queue's name with the namespace in front, if there is one.

    ``{name}:hooks`` is a queue too: the one on which the webhooks of `name` wait, under its hash tag. It has one key
    more, `gone`, which workers set: a URL whose receiver answered 410.
    """

    __slots__ = (
        "absent",
        "base",
        "config",
        "dead",
        "leases",
        "name",
        "ready",
        "room",
        "scheduled",
        "schedules",
        "seq",
        "signal",
        "tag",
        "watch",
        "workers",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        # A namespace stands in front of the brace.
        hooks = name.endswith("}:hooks")
        self.tag = name.removesuffix("}:hooks").replace("{", "", 1) if hooks else name
        self.base = base = f"{{{self.tag}}}:hooks:" if hooks else f"{{{name}}}:"
        self.ready = base + "ready"
        self.scheduled = base + "scheduled"
        self.leases = base + "leases"
        self.schedules = base + "schedules"
        self.dead = base + "dead"
        self.seq = base + "seq"
        self.signal = base + "signal"
        self.config = base + "config"
        self.room = base + "room"
        self.workers = base + "workers"
        self.watch = base + "watch"
        self.absent = base + "absent"
        """A key that never exists. A script that finds keys by itself names it, and so runs only where the whole queue
        is: in a slot that moves key by key a cluster refuses every script that names a key which is not there."""

    def job(self, id: str) -> str:
        return f"{self.base}job:{id}"

    def events(self, id: str) -> str:
        return f"{self.base}events:{id}"

    def steps(self, id: str) -> str:
        return f"{self.base}steps:{id}"

    def idem(self, key: str) -> str:
        return f"{self.base}idem:{key}"

    def gone(self, url_digest: str) -> str:
        return f"{self.base}gone:{url_digest}"

    def usage(self, day: str) -> str:
        return f"{self.base}usage:{day}"

    def owner(self, owner: str) -> str:
        return f"{self.base}owner:{owner}"

    def take(self, worker: str) -> str:
        return f"{self.base}take:{worker}"

    def ctl(self, worker: str) -> str:
        return f"{self.base}ctl:{worker}"
