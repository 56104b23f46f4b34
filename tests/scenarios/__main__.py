"""Which tests hold which scenario: `python -m tests.scenarios`, or with numbers for some of them.

A test belongs to a scenario when its name carries the number: `test_h18_…`, or `test_h32_h33_…` for several.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
TITLES = {
    "01": "Reply to enqueue is lost, client retries, no key given",
    "02": "Fifty concurrent enqueues with one key",
    "03": "An old job's end must not free a key that a newer job holds",
    "04": "Idempotency TTL longer than result TTL",
    "05": "Healthy long job with no output is not handed out again",
    "06": "Worker is killed in mid-job",
    "07": "The only worker is down for long, then returns",
    "08": "Failover loses the last writes",
    "09": "Doorbell is lost",
    "10": "Worker is frozen past its lease and wakes up",
    "11": "Lease lost: the local copy stops spending",
    "12": "Redis pauses longer than every lease",
    "13": "Cleanup never turns a finished job into a failed one",
    "14": "Cancel in every state",
    "15": "Cancel, then enqueue the same id at once",
    "16": "Cancel while the owner is dead",
    "17": "Cancel reaches a silent handler",
    "18": "Cancel races with the take",
    "19": "A timeout inside the handler is not a user cancel",
    "20": "The provider connection really closes",
    "21": "Strange retry-after values",
    "22": "Handler that kills its process every time",
    "23": "Payload that cannot be decoded",
    "24": "Result that cannot be stored",
    "25": "retry_dead done twice and at once",
    "26": "Urgent job jumps a deep backlog",
    "27": "A reclaimed or retried job keeps its rank",
    "28": "Extreme delays",
    "29": "A due job starts on an otherwise idle queue",
    "30": "Work spreads over workers",
    "31": "A character split over two chunks",
    "32": "Line ends inside chunks",
    "33": "Empty chunks and blanks at the edges",
    "34": "100 000 chunks and a late reader",
    "35": "Cursor from an earlier life of the same id",
    "36": "Garbage cursors",
    "37": "Reader after the end",
    "38": "Reply to emit is lost",
    "39": "Falsy results",
    "40": "Large and exact numbers, and digit strings",
    "41": "Empty containers and odd keys survive the server scripts",
    "42": "Progress values",
    "43": "Every id the queue accepts works",
    "44": "Keys of one queue or job cannot be those of another",
    "45": "Answers that are not what they should be",
    "46": "Server accepts and never answers",
    "47": "Server errors by name",
    "48": "Script cache is flushed under load",
    "49": "Memory is full, no eviction",
    "50": "Redis restarts with its data kept",
    "51": "Worker starts before Redis, or its name does not resolve",
    "52": "A cancelled call must not shift the replies",
    "53": "Block time longer than the socket limit",
    "54": "Viewers that vanish",
    "55": "The job is done but the link is down at that moment",
    "56": "Silence longer than a proxy's idle limit",
    "57": "Browser reconnects after the end",
    "58": "Viewer leaves while middleware is in the way",
    "59": "Function is killed at its time limit",
    "60": "One warm function, many event loops",
    "61": "Import and use without sockets, TLS module, threads",
    "62": "Signals: once, twice, and during start",
    "63": "Idle worker stops quickly",
    "64": "Client used across fork",
    "65": "Async handler that blocks the loop",
    "66": "Health that tells the truth",
    "67": "One million waiting jobs",
    "68": "Server script cache does not grow",
    "69": "Cost of doing nothing",
    "70": "Two releases on one queue",
    "71": "Secrets in logs and messages",
    "72": "A job id is not a permission",
    "73": "Development servers stay at home",
    "74": "Cross-origin use of the edge routes",
}


def by_number() -> dict[str, list[str]]:
    """`path::name` of each test, under each scenario whose number it carries."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^ *(?:async )?def (test_h\d\d_\w+)", path.read_text(), re.MULTILINE):
            for number in re.findall(r"h(\d\d)_", re.match(r"test_(?:h\d\d_)+", name)[0]):  # type: ignore[index]
                found[number].append(f"{path.relative_to(TESTS.parent)}::{name}")
    return dict(found)


if __name__ == "__main__":
    tests = by_number()
    for number in sys.argv[1:] or TITLES:
        print(f"H-{number} {TITLES[number]}")
        for test in tests.get(number, ["no test"]):
            print(f"    {test}")
