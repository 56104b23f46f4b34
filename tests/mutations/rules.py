"""The mutations: what each breaks, and the tests that are there to notice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTATIONS", "Mutation"]

LUA, WORKER = "client/src/outlast/protocol/lua", "worker/src/outlast_worker"


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` (there exactly once) becomes `new`. `tests` are the fewest that should notice."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applies(self, tree: Path) -> bool:
        path = tree / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Change the file for as long as the block runs. Scripts are called by their digests, so those follow."""
        path = tree / self.file
        before = path.read_text(encoding="utf-8")
        path.write_text(before.replace(self.old, self.new), encoding="utf-8")
        try:
            self._digests(tree)
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            self._digests(tree)

    def _digests(self, tree: Path) -> None:
        if self.file.endswith(".lua"):
            subprocess.run([sys.executable, tree / "scripts/digests"], check=True, capture_output=True)


def _script(name: str, breaks: str, old: str, new: str, *tests: str) -> Mutation:
    file = f"{LUA}/{name.partition(':')[0]}.lua"
    return Mutation(name.lstrip("_"), breaks, file, old, new, tests)


def _worker(name: str, breaks: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, breaks, f"{WORKER}/{name.partition(':')[0]}.py", old, new, tests)


def _client(name: str, breaks: str, old: str, new: str, *tests: str) -> Mutation:
    part = name.partition(":")[0]
    folder = "protocol/" if part in ("tail", "calls", "keys") else ""
    return Mutation(name, breaks, f"client/src/outlast/{folder}{part}.py", old, new, tests)


def _edge(name: str, breaks: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, breaks, f"edge/src/outlast_edge/_{name.partition(':')[0]}.py", old, new, tests)


REPEATS = "protocol/test_replay.py::test_a_repeat_answers_the_same_and_changes_nothing"
REPLAY, TRANSITIONS, MEMORY = "protocol/test_replay.py::", "protocol/test_transitions.py::", "protocol/test_memory.py::"
LIMITS, TAIL, SCALE = "limits/test_scripts.py::", "protocol/test_tail.py::", "scenarios/test_scale.py::"

MUTATIONS = [
    # -- enqueue -----------------------------------------------------------------------------------------------------
    _script(
        "enqueue:repeat",
        "an enqueue whose reply was lost is refused as a second job under its id",
        "if old[2] == nonce or",
        "if",
        f"{REPEATS}[enqueue with an own id]",
    ),
    _script(
        "enqueue:repeat-by-id",
        "an enqueue whose reply was lost makes its job a second time",
        "or nonce == '' and old[5] then",
        "then",
        f"{REPEATS}[enqueue]",
    ),
    _script(
        "enqueue:repeat-by-key",
        "an enqueue whose reply was lost is told that its own job is somebody else's",
        "if held[2] == nonce then",
        "if false then",
        f"{REPEATS}[enqueue with a key]",
    ),
    _script(
        "enqueue:ghost-key",
        "a key whose record is gone swallows every job that comes with it",
        "    if held[1] then",
        "    if true then",
        f"{TRANSITIONS}test_h04_a_key_whose_record_is_gone_makes_a_new_job",
    ),
    _script(
        "enqueue:conflict",
        "another payload under the same key is answered with the first one's job",
        "held[3] ~= hash then",
        "false then",
        f"{TRANSITIONS}test_one_key_with_two_payloads_is_a_conflict_and_writes_nothing",
    ),
    _script(
        "enqueue:in-use",
        "an id is taken from under a running job",
        "status == 'scheduled' or status == 'active') then",
        "status == 'scheduled') then",
        f"{TRANSITIONS}test_an_id_in_use_is_refused_and_nothing_is_written",
    ),
    _script(
        "enqueue:life-above-stream",
        "a reused id's events lie below the cursors that readers of its former life hold",
        "gen = math.max(gen, (parts(top[1])) + 1)",
        "gen = gen + 0",
        f"{TRANSITIONS}test_a_life_lies_above_the_stream_when_the_record_does_not_tell",
    ),
    _script(
        "enqueue:persist",
        "a reused id's stream keeps the time to live of its former life, and vanishes in mid-run",
        "redis.call('PERSIST', events)",
        "redis.call('TYPE', events)",
        f"{TRANSITIONS}test_a_used_id_starts_clean",
    ),
    _script(
        "enqueue:priority",
        "urgent jobs come last",
        "(9 - priority) * RANK",
        "priority * RANK",
        f"{TRANSITIONS}test_higher_priorities_first_and_in_order_within_one",
    ),
    _script(
        "enqueue:earliest-rings",
        "a delayed job that is due before all others wakes nobody",
        "if delay == 0 or redis.call('ZRANGE', lane, 0, 0)[1] == id then",
        "if delay == 0 then",
        f"{TRANSITIONS}test_a_delayed_job_rings_only_when_it_becomes_the_earliest",
    ),
    _script(
        "enqueue:size-limit",
        "a payload over the queue's limit is taken",
        "if limit and #payload > tonumber(limit) then",
        "if false then",
        f"{LIMITS}test_a_payload_over_the_limit_is_refused_and_nothing_is_written",
    ),
    _script(
        "enqueue:walk",
        "an enqueue reads ten thousand of those that wait",
        "-- The first write is one that a full database refuses",
        "redis.call('ZRANGE', lane, 0, 9999) --",
        f"{SCALE}test_h67_no_operation_slows_down_with_a_million_jobs",
    ),
    # -- reserve -----------------------------------------------------------------------------------------------------
    _script(
        "reserve:stale",
        "a request out of a dead socket's buffer takes jobs that nobody will run",
        "if stale_at ~= '' and now > tonumber(stale_at) then",
        "if false then",
        f"{REPLAY}test_a_reserve_that_comes_late_takes_nothing",
    ),
    _script(
        "reserve:repeat",
        "a reserve whose reply was lost takes more jobs and forgets the first",
        "if again then\n  local taken",
        "if false then\n  local taken",
        f"{REPEATS}[reserve]",
    ),
    _script(
        "reserve:repeat-owns",
        "a repeated reserve hands out jobs that have passed to others meanwhile",
        "if r[1] and r[18] == token then",
        "if r[1] then",
        f"{REPLAY}test_a_repeated_reserve_leaves_out_what_it_no_longer_owns",
    ),
    _script(
        "reserve:two-looks",
        "after a stall of the database every running job is handed out again at once",
        "if lapsed[i + 1] % 1 == 0 then",
        "if false then",
        f"{TRANSITIONS}test_h12_after_a_stall_live_owners_renew_before_anybody_reclaims",
    ),
    _script(
        "reserve:grace",
        "the second look does not wait for the grace",
        "string.format('%.9f', now + grace + mark)",
        "string.format('%.9f', now - 1 + mark)",
        f"{TRANSITIONS}test_a_second_look_waits_for_the_grace",
    ),
    _script(
        "reserve:reclaim-finished",
        "a stray lease turns a finished job into a failed one",
        "if r[1] and r[2] == 'active' then",
        "if r[1] then",
        f"{TRANSITIONS}test_h13_cleanup_never_turns_a_finished_job_into_a_failed_one",
    ),
    _script(
        "reserve:attempts",
        "a job that kills its worker every time goes on for ever",
        "(tonumber(r[4]) or 0) < (tonumber(r[5]) or 1)",
        "true",
        f"{TRANSITIONS}test_h22_a_job_that_kills_its_worker_every_time_ends_dead",
    ),
    _script(
        "reserve:reclaim-cancelled",
        "a job that was cancelled while its owner was dead runs again",
        "local cancelled = r[3] == '1'",
        "local cancelled = false",
        f"{TRANSITIONS}test_h16_cancel_while_the_owner_is_dead",
    ),
    _script(
        "reserve:reclaim-fences",
        "the owner of a reclaimed job can still write to it",
        "    redis.call('HDEL', job, 'token')\n    local cancelled",
        "    local cancelled",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing",
        f"{TRANSITIONS}test_h22_a_job_that_kills_its_worker_every_time_ends_dead",
    ),
    _script(
        "reserve:reclaim-webhook",
        "nobody hears of a job that died with its worker",
        "      announce(job, id, r[9], status, ended)\n",
        "",
        "protocol/test_webhooks.py::test_every_end_puts_exactly_one_delivery",
    ),
    _script(
        "reserve:strays",
        "an entry without a record becomes half a record",
        "local fresh = r[1] and not ELSEWHERE[r[9]]",
        "local fresh = not ELSEWHERE[r[9]]",
        f"{TRANSITIONS}test_an_entry_without_a_record_is_dropped_never_made_half_a_record",
    ),
    _script(
        "reserve:watch",
        "a due time wakes every worker that waits",
        "due_in(next_due - now + (other and LATER or 0))",
        "due_in(next_due - now)",
        f"{TRANSITIONS}test_one_worker_waits_for_the_next_due_time_and_the_others_come_a_second_later",
    ),
    _script(
        "reserve:dead-watch",
        "a due time that a dead worker waited for is nobody's",
        "local other = who ~= me and at > now and at <= next_due",
        "local other = who and who ~= me",
        f"{TRANSITIONS}test_one_worker_waits_for_the_next_due_time_and_the_others_come_a_second_later",
    ),
    _script(
        "reserve:mark",
        "a lapsed lease wakes every worker that waits",
        "(theirs and LATER or 0)",
        "0",
        f"{TRANSITIONS}test_a_lapsed_lease_is_waited_for_by_whoever_found_it_and_the_others_come_a_second_later",
    ),
    _script(
        "reserve:own-mark",
        "who found a lapsed lease forgets it when it looks for another reason",
        "next_lapse % 1 ~= 0 and next_lapse % 1 ~= mark",
        "next_lapse % 1 ~= 0",
        f"{TRANSITIONS}test_a_lapsed_lease_is_waited_for_by_whoever_found_it_and_the_others_come_a_second_later",
    ),
    _script(
        "reserve:priority",
        "a delayed job loses its priority when it is due",
        "    to_ready(id, r[3])",
        "    to_ready(id, '0')",
        f"{TRANSITIONS}test_h26_an_urgent_job_jumps_the_backlog_once_due",
    ),
    _script(
        "reserve:restart",
        "an attempt that was given back continues the output of the one before",
        "(attempt > 1 or starts > 1) then",
        "attempt > 1 then",
        f"{TRANSITIONS}test_an_attempt_that_was_given_back_without_its_marker_gets_it_from_the_next",
    ),
    _script(
        "reserve:numbering",
        "a second attempt numbers its events from the start, below what readers have seen",
        "            if ms >= gen then\n              b, n = ms, last\n            end",
        "",
        f"{TRANSITIONS}test_ids_rise_over_attempts_and_the_marker_takes_a_number",
    ),
    _script(
        "reserve:reply-size",
        "one reply holds more than a gateway lets through, after the jobs were taken",
        "bytes > max_bytes then",
        "false then",
        f"{TRANSITIONS}test_a_reply_that_would_be_too_big_puts_the_rest_back",
    ),
    _script(
        "reserve:back",
        "what did not fit into a reply is lost",
        "    redis.call('ZADD', ready, unpack(back))",
        "    local _ = back",
        f"{TRANSITIONS}test_a_reply_that_would_be_too_big_puts_the_rest_back",
    ),
    _script(
        "reserve:pause",
        "a paused queue hands out jobs",
        "if paused > now then\n  k, limited",
        "if false then\n  k, limited",
        f"{TRANSITIONS}test_a_paused_queue_still_promotes_and_reclaims",
    ),
    _script(
        "reserve:concurrency",
        "more jobs run than the limit allows",
        "left = math.max(0, concurrency - redis.call('ZCARD', leases))",
        "left = concurrency",
        f"{LIMITS}test_never_more_run_than_the_limit_and_a_lapsed_lease_still_counts",
    ),
    _script(
        "reserve:limited",
        "a worker that got less than it asked for believes that it is limited, and goes deaf",
        "elseif limited == '0' and left - #jobs <= 0 then",
        "elseif limited == '0' and #jobs < k then",
        f"{LIMITS}test_limited_means_that_nothing_is_allowed_never_that_less_came_than_was_asked_for",
    ),
    _script(
        "reserve:rate",
        "more jobs start in a window than the rate allows",
        "allowed = tat > now + early and 0 or math.min(",
        "allowed = math.min(allowed, math.huge) + 0 * math.min(",
        f"{LIMITS}test_no_window_holds_more_starts_than_the_rate",
    ),
    _script(
        "reserve:burst",
        "a quiet night earns a flood in the morning",
        "tat = math.max(tonumber(rules[11]) or 0, now)",
        "tat = tonumber(rules[11]) or 0",
        f"{LIMITS}test_a_quiet_time_earns_no_more_than_the_burst",
    ),
    _script(
        "reserve:owner-cap",
        "one owner's jobs keep all the others waiting",
        "elseif owner and runs(owner) >= cap then",
        "elseif false then",
        f"{LIMITS}test_one_owners_ten_thousand_jobs_do_not_keep_the_others_waiting",
    ),
    _script(
        "reserve:rings-on",
        "jobs that became due together wake one worker only",
        "if free > 0 then\n  ring(signal, free)",
        "if false then\n  ring(signal, free)",
        f"{TRANSITIONS}test_promoting_or_reclaiming_more_than_is_taken_rings_for_the_rest",
    ),
    _script(
        "reserve:room",
        "room that a dead worker left is told to nobody",
        "local found = left > #jobs and (was_limited == 'room' or concurrency and #second > 0)",
        "local found = left > #jobs and was_limited == 'room'",
        f"{LIMITS}test_a_crash_that_is_found_makes_room",
    ),
    _script(
        "reserve:relief",
        "lapsed leases stop every worker once the database is full",
        "if #first > 0 then\n  relieve()",
        "if #first > 0 then",
        f"{MEMORY}test_lapsed_leases_do_not_stop_a_worker_that_comes_to_free_memory",
    ),
    # -- flush, renew ------------------------------------------------------------------------------------------------
    _script(
        "flush:fence",
        "a worker that lost its job goes on writing into it",
        "if held[1] ~= token then",
        "if false then",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing",
    ),
    _script(
        "flush:repeat",
        "a flush whose reply was lost cannot be repeated",
        "written = ms > tonumber(b) or (ms == tonumber(b) and seq >= n)",
        "written = false",
        f"{REPEATS}[flush]",
    ),
    _script(
        "flush:repeat-unseen",
        "a repeated flush is taken for written although it never arrived",
        "(ms == tonumber(b) and seq >= n)",
        "ms == tonumber(b)",
        f"{REPLAY}test_a_flush_again_writes_if_the_first_never_arrived",
    ),
    _script(
        "flush:lease",
        "a flush that should renew the lease does not",
        "  redis.call('ZADD', leases, int(now + lease), id)\n",
        "",
        "protocol/test_golden.py::test_a_renewing_flush_moves_lease_and_updated_at_as_every_touch_of_benni_does",
    ),
    _script(
        "flush:cancel",
        "a streaming job never hears of its cancel",
        "return held[2] == '1' and 'cancel' or 'ok'",
        "return 'ok'",
        "protocol/test_interop.py::test_their_cancel_of_a_job_on_our_worker",
    ),
    _script(
        "renew:fence",
        "a job can be renewed by a worker that has lost it",
        "if held[1] == token then",
        "if true then",
        f"{REPLAY}test_a_renewal_tells_each_job_apart",
    ),
    _script(
        "renew:cancel",
        "a silent job never hears of a foreign client's cancel",
        "held[2] == '1' and 'cancel' or 'ok'",
        "'ok'",
        f"{REPLAY}test_a_renewal_tells_each_job_apart",
    ),
    _script(
        "renew:relief",
        "with a full database every running job loses its lease",
        "  if relief then",
        "  if false then",
        f"{MEMORY}test_a_renewal_passes_with_relief",
    ),
    _script(
        "flush:retention",
        "the output of a job grows for as long as it talks",
        "'XADD', events, 'MAXLEN', '~', max_len, b",
        "'XADD', events, b",
        f"{SCALE}test_h34_a_hundred_thousand_chunks_are_seen_live_and_ten_thousand_of_them_afterwards",
    ),
    # -- settle, retry, release --------------------------------------------------------------------------------------
    _script(
        "settle:fence",
        "a worker that lost its job ends it all the same",
        "if r[1] ~= token then",
        "if false then",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing",
    ),
    _script(
        "settle:repeat",
        "a settle whose reply was lost is told that its lease is lost",
        "if r[3] == token and (",
        "if false and (",
        f"{REPEATS}[settle completed]",
    ),
    _script(
        "settle:repeat-late",
        "a settle that comes again after a revival reports an end that is none",
        "(r[4] == 'completed' or r[4] == 'failed' or r[4] == 'cancelled') then",
        "r[4] then",
        f"{REPLAY}test_a_late_settle_after_a_revival_changes_nothing",
    ),
    _script(
        "settle:cancel-wins",
        "a cancelled job completes",
        "if r[2] == '1' then\n  status, body",
        "if false then\n  status, body",
        f"{TRANSITIONS}test_a_cancel_that_came_first_wins_over_every_outcome",
    ),
    _script(
        "settle:lease",
        "a job that has ended keeps its lease",
        "redis.call('ZREM', leases, id)",
        "redis.call('ZREM', leases, '')",
        "protocol/test_golden.py::test_golden_state_is_reproduced[07-completed]",
    ),
    _script(
        "settle:key-life",
        "a key outlives the record that it answers with",
        "int(math.min(tonumber(r[5]) or tonumber(ttl), tonumber(ttl)))",
        "int(tonumber(r[5]) or tonumber(ttl))",
        f"{TRANSITIONS}test_h04_a_key_never_lives_longer_than_its_record",
    ),
    _script(
        "settle:key-freed",
        "the key of a failed job blocks the next try",
        "  if status ~= 'completed' then\n    free_key(idem, id)",
        "  if status ~= 'completed' then",
        "protocol/test_golden.py::test_golden_state_is_reproduced[22-idempotency-freed]",
    ),
    _script(
        "settle:steps-life",
        "steps stay for ever",
        "if steps then\n  redis.call('PEXPIRE', steps, ttl)",
        "if steps then\n  redis.call('PERSIST', steps)",
        "steps/test_steps.py::test_steps_live_as_long_as_the_life_of_their_job",
    ),
    _script(
        "retry:fence",
        "a worker that lost its job schedules it again",
        "if r[1] ~= token then",
        "if false then",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing",
    ),
    _script(
        "retry:cancel-wins",
        "a cancelled job is tried again",
        "if r[2] == '1' then",
        "if false then",
        f"{TRANSITIONS}test_a_cancel_that_came_first_wins_over_every_outcome",
    ),
    _script(
        "retry:two-places",
        "a job that waits for its next attempt is still listed as running",
        "local now = clock(now_arg)\nredis.call('ZREM', leases, id)",
        "local now = clock(now_arg)",
        "protocol/test_golden.py::test_golden_state_is_reproduced[10-retry-scheduled]",
    ),
    _script(
        "retry:rings",
        "a retry by a worker that stops is due with nobody to look",
        "if rings then",
        "if false then",
        f"{TRANSITIONS}test_a_retry_rings_only_for_a_worker_that_stops",
    ),
    _script(
        "release:fence",
        "a worker that lost its job hands it back all the same",
        "if r[1] ~= token then",
        "if false then",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing",
    ),
    _script(
        "release:attempt",
        "a deploy costs an attempt",
        "int(attempt - 1)",
        "int(attempt)",
        f"{TRANSITIONS}test_a_job_that_is_handed_back_keeps_its_rank",
        f"{TRANSITIONS}test_a_release_can_pause_the_queue_and_a_pause_never_shortens",
    ),
    _script(
        "release:rank",
        "a job that is handed back goes to the end of the queue",
        "redis.call('ZADD', ready, rank, id)",
        "redis.call('ZADD', ready, int(9 * RANK + now), id)",
        f"{TRANSITIONS}test_a_job_that_is_handed_back_keeps_its_rank",
    ),
    _script(
        "release:pause",
        "a shorter pause ends a longer one",
        "if now + pause > old then",
        "if true then",
        f"{TRANSITIONS}test_a_release_can_pause_the_queue_and_a_pause_never_shortens",
    ),
    _script(
        "release:marker",
        "what a handed-back attempt wrote stays in front of a foreign worker's output",
        "local top = emitted and top_of(events)",
        "local top = false",
        "protocol/test_interop.py::test_an_attempt_given_back_by_us_starts_over_with_them",
    ),
    _script(
        "release:cancel-wins",
        "a cancelled job is handed to the next worker",
        "if r[2] == '1' then",
        "if false then",
        f"{TRANSITIONS}test_a_cancel_that_came_first_wins_over_every_outcome",
    ),
    _script(
        "settle:cancel-races",
        "a job completes although its cancel was told that it would not",
        "if r[2] == '1' then",
        "if false then",
        "worker/test_cancel.py::test_h18_cancel_races_with_the_take",
    ),
    # -- cancel, retry_dead, prune_dead, step, admit -------------------------------------------------------------------
    _script(
        "cancel:push",
        "a silent worker hears of a cancel with its next heartbeat only",
        "if redis.call('RPUSH', ctl, r[3] .. ' ' .. id) == 1 then",
        "if false then",
        f"{TRANSITIONS}test_cancel_is_pushed_to_the_worker_that_holds_the_job",
    ),
    _script(
        "cancel:finished",
        "a finished job is cancelled and loses its result",
        "elseif status == 'completed' or status == 'failed' then",
        "elseif status == 'failed' then",
        f"{TRANSITIONS}test_h14_cancel_in_every_state",
    ),
    _script(
        "cancel:listed",
        "a cancelled job is still in the line",
        "elseif redis.call('ZREM', ready, id) == 0 then",
        "elseif true then",
        f"{TRANSITIONS}test_h14_cancel_in_every_state",
    ),
    _script(
        "cancel:key",
        "the key of a cancelled job blocks the next one",
        "  free_key(base .. 'idem:' .. r[5], id)",
        "  local _ = base",
        "protocol/test_golden.py::test_golden_state_is_reproduced[14-cancelled-waiting]",
        f"{TRANSITIONS}test_h14_cancel_in_every_state",
    ),
    _script(
        "cancel:relief",
        "with a full database no running job can be stopped",
        "  if relief then",
        "  if false then",
        f"{MEMORY}test_cancel_of_a_running_job_passes_with_relief",
    ),
    _script(
        "retry_dead:repeat",
        "a revival whose reply was lost says that there was nothing to revive",
        "if r[1] and r[3] == nonce then",
        "if false then",
        f"{REPEATS}[retry_dead]",
    ),
    _script(
        "retry_dead:persist",
        "a revived job vanishes in mid-run",
        "redis.call('PERSIST', job)\nredis.call('PERSIST', events)",
        "redis.call('PERSIST', events)",
        f"{TRANSITIONS}test_a_revived_job_lives_on_without_a_ttl",
    ),
    _script(
        "retry_dead:marker",
        "whoever has seen the stale end of a revived job never hears of the new one",
        "restart(events, int(b) .. '-' .. int(n + 1), '1')",
        "local _ = n",
        f"{TRANSITIONS}test_a_revived_job_that_lost_its_end_still_gets_its_marker",
    ),
    _script(
        "prune_dead:newer",
        "a dead letter that is still there is dropped from the list",
        "~= 'failed' then",
        "== 'failed' then",
        f"{TRANSITIONS}test_prune_takes_a_batch_and_asks_to_be_called_again",
        f"{TRANSITIONS}test_a_stale_dead_entry_does_not_show_a_newer_job_as_dead",
    ),
    _script(
        "purge_dead:newer",
        "a purge of the dead takes a living job that has the id of one of them",
        "[1] == 'failed' then",
        "[1] then",
        f"{TRANSITIONS}test_a_purge_of_the_dead_spares_a_newer_job_under_the_same_id",
    ),
    _script(
        "cancel:purge",
        "a purge of what waits ends what runs",
        "elseif before ~= '' and (status == 'active' or ",
        "elseif before ~= '' and (",
        f"{TRANSITIONS}test_a_purge_that_meets_a_job_that_has_just_started_lets_it_run",
    ),
    _script(
        "step:fence",
        "a worker that lost its job overwrites the steps of the one that has it",
        "if held[1] ~= token then",
        "if false then",
        f"{REPLAY}test_h10_a_stale_token_changes_nothing[taken over-step]",
    ),
    _script(
        "step:stale",
        "steps of another life of the id are taken for this one's",
        "if stale and redis.call('HMGET', steps, 'gen')[1] ~= gen then",
        "if false then",
        "steps/test_steps.py::test_steps_live_as_long_as_the_life_of_their_job",
    ),
    _script(
        "step:life",
        "steps of a job that a foreign worker ends stay for ever",
        "redis.call('PEXPIRE', steps, ttl)",
        "redis.call('PERSIST', steps)",
        "steps/test_steps.py::test_steps_of_a_job_that_a_foreign_worker_ends_do_not_stay_for_ever",
    ),
    _script(
        "admit:rings",
        "a job that comes to its turn under its owner's cap wakes nobody",
        "ring(signal, 1)",
        "local _ = signal",
        f"{LIMITS}test_a_held_back_job_comes_before_those_that_came_after_it_and_wakes_somebody",
    ),
    # -- what the scripts share --------------------------------------------------------------------------------------
    _script(
        "_prelude:free-key",
        "an older job's end frees the key of a newer one",
        "if redis.call('GET', idem) == id then\n    redis.call('DEL', idem)",
        "if true then\n    redis.call('DEL', idem)",
        f"{TRANSITIONS}test_h03_also_when_the_older_job_ends_otherwise",
    ),
    _script(
        "_prelude:signal-cap",
        "doorbells pile up without end while no worker is there",
        "> SIGNAL_CAP then",
        "> 1e9 then",
        f"{TRANSITIONS}test_the_doorbell_list_is_bounded",
    ),
    _script(
        "_prelude:held-back",
        "a job of a capped owner that runs again at once is no longer counted",
        "  if not redis.call('ZSCORE', leases, id) then\n    redis.call('ZREM', owner, id)\n  end",
        "  redis.call('ZREM', owner, id)",
        f"{LIMITS}test_a_job_that_runs_again_at_once_still_counts",
    ),
    _script(
        "_prelude:held-order",
        "jobs that a cap held back come to the end of the line",
        "redis.call('ZADD', ready, held[i + 1], held[i])",
        "redis.call('ZADD', ready, int(1e15), held[i])",
        f"{LIMITS}test_a_held_back_job_comes_before_those_that_came_after_it_and_wakes_somebody",
    ),
    _script(
        "_prelude:restart-trims",
        "what the attempt before wrote stays in front of the marker",
        "redis.call('XTRIM', events, 'MINID', id)",
        "redis.call('XLEN', events)",
        f"{TRANSITIONS}test_ids_rise_over_attempts_and_the_marker_takes_a_number",
    ),
    _script(
        "_prelude:totals",
        "a second job's usage replaces the day's total",
        "local sum = (tonumber(before[i]) or 0) + tonumber(amounts[2 * i])",
        "local sum = tonumber(amounts[2 * i])",
        "limits/test_money.py::test_usage_adds_up_over_attempts_and_over_the_jobs_of_a_day",
    ),
    _client(
        "calls:script-each",
        "each queue has scripts of its own in the server",
        "script.source, *self.args)",
        "script.source + '--' + self.args[1], *self.args)",
        f"{SCALE}test_h68_the_server_keeps_each_script_once_whatever_its_clients_are_called_and_set_to",
    ),
    _client(
        "calls:stats-walk",
        "`stats` reads all that wait",
        '"LIMIT", "0", "1")',
        '"LIMIT", "0", "10000")',
        f"{SCALE}test_h67_no_operation_slows_down_with_a_million_jobs",
    ),
    # -- worker: leases ----------------------------------------------------------------------------------------------
    _worker(
        "attempt:lease-deadline",
        "code that is stuck for good holds its job for good",
        "self._lease.until = time.monotonic() + timeout_ms / 1000",
        "pass",
        "worker/test_leases.py::test_h65_blocking_code_holds_its_job_no_longer_than_an_attempt_may_take",
    ),
    _worker(
        "leases:cut-off",
        "a job goes on spending although its lease ran out unrenewed",
        '            lease.report("unreachable")',
        "            pass",
        "faults/test_stalls.py::test_h11_a_plain_handler_is_told_too",
    ),
    _worker(
        "leases:renewal",
        "a silent job loses its lease",
        "                    self._renew(due, relief)\n",
        "",
        "worker/test_leases.py::test_h05_a_healthy_silent_job_is_not_handed_out_again",
    ),
    _worker(
        "leases:report",
        "a lost lease goes on costing money",
        '                if answer != "ok":\n                    self._tell(lease.report, answer)',
        "",
        "worker/test_cancel.py::test_h17_what_nobody_tells_a_silent_handler_is_noticed_with_the_next_renewal",
    ),
    # -- worker: outcomes --------------------------------------------------------------------------------------------
    _worker(
        "policy:jitter",
        "jobs that failed together come back together",
        "return round(random.uniform(0, ceiling))",
        "return round(ceiling)",
        "worker/test_policy.py::test_backoff_is_drawn_evenly_up_to_its_ceiling",
    ),
    _worker(
        "policy:ceiling",
        "the pause between attempts grows without end",
        "min(queue.max_backoff_ms, queue.backoff_ms * 2 ** min(attempt - 1, 40))",
        "queue.backoff_ms * 2 ** min(attempt - 1, 40)",
        "worker/test_policy.py::test_backoff_is_drawn_evenly_up_to_its_ceiling",
    ),
    _worker(
        "policy:retry-after",
        "the delay that a handler asked for is ignored",
        "if isinstance(error, RetryJobError) and error.retry_after is not None:",
        "if False:",
        "worker/test_policy.py::test_h21_a_finite_retry_after_is_obeyed",
    ),
    _worker(
        "policy:terminal",
        "what can never succeed is paid for three times",
        "return not isinstance(error, TerminalJobError)",
        "return True",
        "worker/test_policy.py::test_default_classification",
    ),
    _worker(
        "policy:secrets",
        "a validation error's text quotes the prompt",
        "explain_validation(error) if _is_validation_error(error) else str(error)",
        "str(error)",
        "worker/test_policy.py::test_an_error_of_validation_is_told_without_the_input",
    ),
    _worker(
        "attempt:attempts",
        "one attempt more than allowed",
        "if job.attempt >= job.max_attempts or",
        "if job.attempt > job.max_attempts or",
        "worker/test_attempts.py::test_a_job_runs_as_often_as_it_may_and_no_more",
    ),
    _worker(
        "attempt:expired",
        "a job that has expired runs",
        "if limit is not None and limit <= now:",
        "if False:",
        "worker/test_attempts.py::test_an_expired_job_is_not_run",
    ),
    _worker(
        "attempt:swallowed-cancel",
        "a handler that swallows its cancel completes a cancelled job",
        "        if self._task is not None and not self._task.done():\n            self._task.cancel()",
        "",
        "worker/test_cancel.py::test_h17_a_silent_handler_is_interrupted_at_once",
    ),
    _worker(
        "attempt:text-before-end",
        "watchers see the end before the last text",
        "            await self._output.flush_last()\n",
        "",
        "worker/test_output.py::test_the_first_text_goes_out_at_once_and_the_rest_is_joined",
    ),
    _worker(
        "attempt:result-kept",
        "a finished result is dropped when the link is down at that moment",
        "            if self._hopeless():\n                break",
        "            break",
        "faults/test_stalls.py::test_h55_a_finished_result_is_kept_for_as_long_as_nobody_else_takes_the_job",
    ),
    _worker(
        "attempt:shutdown",
        "a deploy counts as a failed attempt",
        '                case "shutdown":\n                    return _Outcome("release")',
        '                case "shutdown":\n                    return _Outcome("retry")',
        "worker/test_lifecycle.py::test_h62_the_second_signal_hands_jobs_back",
    ),
    _worker(
        "attempt:rate-limit",
        "a provider's 429 costs an attempt and pauses nobody",
        "if isinstance(error, RateLimitedError):\n                self._log",
        "if False:\n                self._log",
        "worker/test_attempts.py::test_a_rate_limit_gives_the_attempt_back_and_pauses_the_queue",
    ),
    # -- worker: intake, output, steps, end --------------------------------------------------------------------------
    _worker(
        "intake:repeat",
        "jobs taken by a reserve whose reply was lost wait for their lease to run out",
        "again = again or error.maybe_applied",
        "again = False",
        "worker/test_leases.py::test_jobs_taken_by_a_reserve_whose_reply_was_lost_are_run",
    ),
    _worker(
        "intake:late-original",
        "a repeat does not wait until the original can do nothing any more",
        "await asyncio.sleep(max(0, stale_at - engine.clock.now_ms()) / 1000 + 0.02)",
        "await asyncio.sleep(0)",
        "worker/test_leases.py::test_a_request_that_arrives_after_its_repeat_takes_nothing",
    ),
    _worker(
        "intake:cancel",
        "a cancel is heard and ignored",
        'if key == intake.ctl and value != ".":',
        "if False:",
        "worker/test_cancel.py::test_h17_a_saturated_worker_hears_cancels_too",
    ),
    _worker(
        "intake:hungry",
        "a full worker takes one job for each doorbell and lets the rest wait",
        "self.hungry = taken == k and not self.limited",
        "self.hungry = False",
        "worker/test_intake.py::test_a_backlog_without_doorbells_is_worked_off",
    ),
    _worker(
        "intake:bell-passed-on",
        "a doorbell that a stopping worker heard is lost",
        "                if intake.stopped:\n                    await intake.ring()\n                    return",
        "                if intake.stopped:\n                    return",
        "worker/test_lifecycle.py::test_h63_a_doorbell_that_a_stopping_worker_heard_is_passed_on",
    ),
    _worker(
        "intake:due-timer",
        "a job that becomes due on an idle queue waits for the next block",
        "self._hint = self._loop.call_later(hint_ms / 1000, self.look)",
        "pass",
        "worker/test_intake.py::test_h29_a_due_job_starts_on_an_idle_queue",
    ),
    _worker(
        "intake:limit",
        "a worker whose limit is used up does not hear that there is room again",
        "return self.keys.room if self.limited else",
        "return self.keys.signal if self.limited else",
        "limits/test_fleet.py::test_a_draining_worker_hands_its_room_to_another",
        "limits/test_fleet.py::test_limits_that_change_reach_workers_that_wait_for_them",
    ),
    _worker(
        "output:repeat",
        "text whose flush lost its reply is written twice, or ends the attempt",
        'again = again or getattr(error, "maybe_applied", True)',
        "again = False",
        "worker/test_output.py::test_h38_lost_replies_neither_lose_nor_repeat_text",
    ),
    _worker(
        "output:pressure",
        "a handler that emits faster than the database takes fills the memory",
        "while self.full and not self.closed:",
        "while False:",
        "worker/test_output.py::test_a_handler_that_emits_faster_than_the_database_takes_waits",
    ),
    _worker(
        "output:half-characters",
        "an emoji that a provider splits over two chunks becomes two question marks",
        "text, self._half = text[:-1], text[-1]",
        "pass",
        "worker/test_output.py::test_h31_a_character_split_over_two_chunks",
    ),
    _worker(
        "steps:kept",
        "every attempt pays for its steps again",
        "return self._kept.get(name)",
        "return None",
        "steps/test_steps.py::test_a_failure_on_chunk_40_of_50_costs_one_chunk",
    ),
    _worker(
        "steps:shield",
        "a step that was paid for is not stored if its handler is stopped",
        "await asyncio.shield(task)  #",
        "await task  #",
        "steps/test_steps.py::test_a_step_that_was_paid_for_is_stored_although_its_handler_is_stopped",
    ),
    _worker(
        "engine:registry",
        "a worker that has ended stays in the list",
        "await self._end({self.loop.create_task(self._sign_off())})",
        "pass",
        "worker/test_lifecycle.py::test_h63_many_rounds_leave_nothing",
        "worker/test_leases.py::test_the_worker_says_in_the_registry_that_it_lives",
    ),
    _worker(
        "usage:budget",
        "a job spends more than its budget",
        "if (used := self._amounts.get(counter, 0)) > most:",
        "if False:",
        "limits/test_money.py::test_exceeding_the_budget_ends_the_job_for_good",
    ),
    _worker(
        "tcp:not-replayable",
        "a call that may not run twice is repeated after its reply was lost",
        "((error.maybe_applied or ask.block) and not call.replayable)",
        "False",
        "worker/test_transport.py::test_a_lost_reply_is_an_error_when_a_repeat_would_change_something",
    ),
    _worker(
        "intake:block",
        "an idle worker asks every tenth of a second",
        'f"{block:.3f}")',
        '"0.1")',
        f"{SCALE}test_h69_an_idle_worker_sends_one_look_a_block_or_a_poll",
    ),
    # -- client: the reader's side -----------------------------------------------------------------------------------
    _worker(
        "intake:watch",
        "a worker that stops leaves a due time to nobody",
        "            if self._armed_at < inf:\n                await self._give_watch_up()\n",
        "            if False:\n                await self._give_watch_up()\n",
        "worker/test_intake.py::test_a_worker_that_stops_leaves_the_waiting_to_another",
    ),
    _client(
        "keys:absent",
        "jobs are dropped while their slot moves key by key",
        'self.absent = base + "absent"',
        'self.absent = base + "seq"',
        "faults/test_topologies.py::test_a_job_whose_record_moves_before_the_lists_is_kept",
    ),
    _worker(
        "attempt:cancelled-count",
        "who watches a job that is cancelled in an outage drops the text that there is",
        "count = self._output.count if ends else self._output.written",
        "count = self._output.count",
        "faults/test_stalls.py::test_a_cancel_during_an_outage_ends_the_text_without_a_gap",
    ),
    _client(
        "tail:gap",
        "a reader that missed text is not told",
        "            if at[1] > next_n:\n",
        "            if False:\n",
        f"{TAIL}test_a_gap_in_the_middle_and_one_before_the_end",
    ),
    _client(
        "tail:gap-before-end",
        "text missing right before the end is not told",
        "if not self._loose and count > (self._last[1] if self._last else 0):",
        "if False:",
        f"{TAIL}test_a_gap_in_the_middle_and_one_before_the_end",
    ),
    _client(
        "tail:restart",
        "a reader whose restart marker was trimmed joins two attempts",
        "if known and (known[0] != at[0] or",
        "if known and False and (known[0] != at[0] or",
        f"{TAIL}test_a_restart_whose_marker_was_trimmed_is_inferred",
    ),
    _client(
        "tail:lost-end",
        "a job whose last event was lost is watched for ever",
        "            if self._record:\n                return self._conclude()\n            self.delay",
        "            self.delay",
        f"{TAIL}test_a_lost_end_is_made_up_from_the_record",
    ),
    _client(
        "tail:early-end",
        "an end is made up although the stream holds it",
        "            # The job may have ended between the empty read and this answer: look again before making "
        "the end up.\n"
        '            self._step = "top"\n            return []',
        "            return self._conclude()",
        f"{TAIL}test_an_end_between_the_empty_read_and_the_look_at_the_record_is_not_made_up",
    ),
    _client(
        "tail:foreign-cursor",
        "a cursor of another life waits for ever in silence",
        'self._step = "top" if self._resumed and not self._read_regions else "read"',
        'self._step = "read"',
        f"{TAIL}test_h36_a_cursor_from_the_future_is_answered_and_starts_over",
    ),
    _client(
        "tail:unknown",
        "an unknown job is waited for",
        "        if row[0] is None:\n",
        "        if False:\n",
        f"{TAIL}test_h37_an_unknown_job_is_told_at_once",
        f"{TAIL}test_a_job_that_vanishes_under_its_watcher_is_told",
    ),
    _client(
        "tail:jitter",
        "readers that started together poll together for ever",
        "pause *= random.uniform(1.0, 1.2)",
        "pause *= 1.1",
        f"{TAIL}test_two_readers_do_not_keep_step",
    ),
    _client(
        "rest:not-replayable",
        "a call that may not run twice is repeated although its outcome is unknown",
        "if error.maybe_applied and not all(self._calls[slot].replayable for slot in self._open):",
        "if False:",
        "client/test_rest.py::test_an_unknown_outcome_is_tried_again_only_if_the_call_is_replayable",
    ),
    _client(
        "rest:plain-http",
        "the token travels over the network in the clear",
        'if parts.scheme == "http" and not allow_http and not _is_loopback(host):',
        "if False:",
        "client/test_rest.py::test_an_address_that_cannot_work_or_would_leak_is_refused_without_being_quoted",
    ),
    # -- edge --------------------------------------------------------------------------------------------------------
    _edge(
        "edge:owner",
        "everybody reads everybody's jobs",
        "(owner is ANY or (owner is not None and owner == job.owner))",
        "owner is not None",
        "edge/test_access.py::test_h72_somebody_elses_job_answers_like_an_unknown_one",
    ),
    _edge(
        "edge:key-owner",
        "somebody else's idempotency key finds his job",
        "json.dumps([owner, key])",
        "json.dumps([key])",
        "edge/test_enqueue.py::test_a_key_is_its_owners_alone",
    ),
    _edge(
        "edge:accept",
        "any caller chooses priority and attempts",
        "if not trusted and name not in self._accept:",
        "if False:",
        "edge/test_enqueue.py::test_options_are_for_the_trusted_unless_opened",
    ),
    _edge(
        "edge:cancel-by-token",
        "a watch token cancels",
        'ANY if token is not None and action != "cancel" else',
        "ANY if token is not None else",
        "edge/test_access.py::test_a_watch_token_opens_one_job_for_reading",
    ),
    _edge(
        "tokens:signature",
        "anybody can write himself a watch token",
        "if found is None or not any(hmac.compare_digest(_sign(s, queue, id, found[1]), found[2]) for s in secrets):",
        "if found is None:",
        "edge/test_access.py::test_a_watch_token_opens_one_job_for_reading",
    ),
    _edge(
        "tokens:expiry",
        "a watch token is good for ever",
        "if time.time() >= int(found[1]):",
        "if False:",
        "edge/test_access.py::test_a_watch_token_expires_and_its_secret_can_be_changed",
    ),
]
