"""Where our database states and answers differ on purpose from the golden ones, all of it.

A path is that of a flattened state: ``state<index>/<key>/<what>/...`` or ``api/<call>/...``; ``*`` matches anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

ABSENT: Final = "<absent>"
ANY: Final = "<any>"


@dataclass(frozen=True)
class Difference:
    path: str
    where: frozenset[str]
    """Scenarios that have it, each at least once."""
    why: str
    theirs: Any = ABSENT
    ours: Any = ANY


def some(numbers: str) -> frozenset[str]:
    return frozenset(numbers.split())


ALL = frozenset(f"{n:02}" for n in range(1, 31))
TAKEN = ALL - some("01 02 03 14 15 19 23 30")
"""A worker of ours took a job."""

DIFFERENCES = (
    # -- added fields of the record (DESIGN §2: the other side ignores them)
    Difference("state*/job:*/fields/gen", ALL - some("30"), "added field: the life of the id that this record is"),
    Difference("state*/job:*/fields/nonce", ALL - some("02 30"), "added field: a repeat of the enqueue is recognised"),
    Difference("state*/job:*/fields/payloadHash", some("19"), "added field: one key with two payloads is a conflict"),
    Difference(
        "state*/job:*/fields/settled",
        some("07 08 09 10 11 12 13 17 18 20 21 22 25 29"),
        "added field: a repeat of settle, retry or release is recognised",
    ),
    Difference("state*/job:*/fields/revived", some("25"), "added field: a repeat of retry_dead is recognised"),
    Difference("state*/job:*/fields/starts", some("25"), "added field: takes, which a fresh attempt count hides"),
    # -- added keys (PROTOCOL, keys beside the wire format)
    Difference("state*/take:w*/*", TAKEN, "added key: what a reserve took, for a repeat of it"),
    Difference("state*/ctl:w/*", some("16 17 18 28"), "added key: the cancel is pushed to the worker"),
    # -- events
    Difference(
        "state*/events:*/entries/*/numbered by",
        some("06 07 09 10 12 13 16 17 26"),
        "explicit stream ids: the holder numbers its events, so an id is a cursor that nothing can hide",
        theirs="server",
        ours="holder",
    ),
    Difference(
        "state*/events:*/entries/*/a",
        some("06 07 08 09 10 12 13 14 15 16 17 18 20 21 22 24 25 26 27 28 29"),
        "added field of an entry: its attempt, from which a trimmed restart is inferred",
    ),
    Difference(
        "state*/events:*/entries/*/n",
        some("07 08 09 13 17 18 20 21 22 29"),
        "added field of a settle's entry: how many events came before, so that a gap before the end is seen",
    ),
    # -- doorbell tokens are hints, not counts
    Difference(
        "state*/signal/*",
        TAKEN | some("30"),
        "05: reserve eats no doorbell token; only the worker that blocks on the list takes one",
    ),
    Difference(
        "state*/signal/*",
        some("03 15"),
        "wire.md §2.2, 16: a delayed job that becomes the earliest rings, so that a blocked worker sets its timer anew",
    ),
    # -- decided otherwise, or faults that wire.md §2 names
    Difference(
        "state0/job:job-a/fields/updatedAt",
        some("06"),
        "06: a flush renews lease and updatedAt only once a quarter of the lease has passed",
        theirs="1800000002500",
        ours="1800000000000",
    ),
    Difference(
        "state0/leases/members/job-a",
        some("06"),
        "06: a flush renews lease and updatedAt only once a quarter of the lease has passed",
        theirs="1800000062500",
        ours="1800000060000",
    ),
    Difference(
        "api/cancel job-a again",
        some("14"),
        "14: cancel answers whether the job will produce no result, so a repeat is true again",
        theirs=False,
        ours=True,
    ),
    Difference(
        "api/reuse",
        some("23"),
        "23: our own error and words",
        theirs='ValidationError: queue job id "job-a" is still live (status "waiting"); cancel it or wait for it to '
        "finish before reusing the id",
        ours="JobInUseError: id='job-a' is a job that is still waiting; cancel it or wait for its end, or leave the "
        "id out",
    ),
    Difference(
        "state0/events:job-a/*",
        some("24 25"),
        "24, 25 (wire.md §2.1, 6): the stream starts with `restarted` instead of being deleted under its readers",
    ),
    Difference("api/dead/0", some("30"), "30 (wire.md §2.1, 4): no record, no job", theirs="job-a", ours=ABSENT),
    Difference("api/dead", some("30"), "30: so the list is empty", theirs=ABSENT, ours=[]),
    Difference("state0/dead/*", some("30"), "30: nothing died", theirs=ANY, ours=ABSENT),
    Difference("state0/events:job-a/*", some("30"), "30: nothing was written", theirs=ANY, ours=ABSENT),
    Difference("state0/job:job-a/*", some("30"), "30: no half record was made", theirs=ANY, ours=ABSENT),
)
