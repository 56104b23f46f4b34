"""A read replica that stands still, for tests of what a global database does to its readers.

The copy lives in the last logical database of the same server. Reads go there unless the caller shows a sync token of
a later write, and then, as on Upstash, they see that write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from outlast_worker.gateway.faults import Rule
from outlast_worker.gateway.resp import Error, Reply, encode_command
from outlast_worker.gateway.upstream import Address, Upstream, UpstreamError

MARK = b"outlast:replica"  # set in the copy, so that one left behind by a killed process is known as ours
# One script, so that the copy is of one moment.
_COPY = b"""
local cursor = '0'
repeat
  local page = redis.call('SCAN', cursor, 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do redis.call('COPY', key, key, 'DB', ARGV[1], 'REPLACE') end
until cursor == '0'
"""


@dataclasses.dataclass
class Replica:
    """The copy, the sync token up to which it is complete, and the rule that asked for it."""

    upstream: Upstream
    version: int
    rule: Rule

    @classmethod
    async def freeze(
        cls, primary: Upstream, version: int, rule: Rule, connect: Callable[[Address], Upstream]
    ) -> Replica:
        """Copy the database as it is now. Raises UpstreamError if there is no room for the copy."""
        answer = await _ask(primary, b"CONFIG", b"GET", b"databases")
        count = int(answer[1]) if isinstance(answer, list) and isinstance(answer[1], bytes) else 16
        if count - 1 == primary.address.number:
            raise UpstreamError("replica_lag needs the server's last database, which is the one served", sent=False)
        replica = cls(connect(dataclasses.replace(primary.address, number=count - 1)), version, rule)
        if await _ask(replica.upstream, b"EXISTS", MARK) == 0 and await _ask(replica.upstream, b"DBSIZE") != 0:
            await replica.upstream.aclose()
            raise UpstreamError(f"replica_lag needs database {count - 1} of the server, which is not empty", sent=False)
        await _ask(replica.upstream, b"FLUSHDB")
        await _ask(replica.upstream, b"SET", MARK, b"1")
        await _ask(primary, b"EVAL", _COPY, b"0", b"%d" % (count - 1))
        return replica

    async def drop(self) -> None:
        await _ask(self.upstream, b"FLUSHDB")
        await self.upstream.aclose()


async def _ask(upstream: Upstream, *command: bytes) -> Reply:
    reply = (await upstream.execute(encode_command(command), 1)).replies[0]
    if isinstance(reply, Error):
        raise UpstreamError(f"replica_lag does not work here: {reply.text}", sent=False)
    return reply


def concerns(commands: Sequence[Sequence[bytes]], pattern: str) -> bool:
    """Whether an argument of these commands matches `pattern`: keys replicate each on its own."""
    return any(fnmatchcase(arg.decode("utf-8", "replace"), pattern) for args in commands for arg in args[1:])
