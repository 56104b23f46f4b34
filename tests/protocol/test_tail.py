"""Following a job: nothing lost, nothing twice, no two lives joined, an end for everybody, and few commands."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outlast import InvalidArgumentError, JobNotFoundError, Queue, ReplyShapeError
from outlast.protocol import Keys, Tail
from outlast.protocol.tail import check_cursor

from .lab import Holder, Lab, text_of


def types(events: Sequence[Any]) -> list[str]:
    return [event.type for event in events]


def finished(lab: Lab, end: str = "complete", chunks: str = "abc") -> Holder:
    job = lab.running()
    job.emit(*chunks)
    if lab.now is None:
        time.sleep(0.002)  # the end has a millisecond of its own
    else:
        lab.now += 1
    if end == "cancel":
        lab.cancel()
        job.complete()
    else:
        getattr(job, end)()
    return job


# -- a plain watch ---------------------------------------------------------------------------------------------------


def test_a_watcher_sees_everything_once_and_then_the_end(lab: Lab) -> None:
    lab.enqueue()
    tail = lab.tail()
    assert lab.drain(tail) == []
    job = lab.one()
    seen = []
    job.emit("Hello ", "world")
    seen += lab.drain(tail)
    job.flush(("data", '{"tool":[1,null]}'))
    job.progress("0.25")
    seen += lab.drain(tail)
    job.emit("!")
    job.complete('{"n":1}')
    seen += lab.drain(tail)
    assert types(seen) == ["chunk", "chunk", "data", "progress", "chunk", "completed"]
    assert (seen[2].value, seen[3].value, seen[5].result) == ({"tool": [1, None]}, 0.25, {"n": 1})
    assert [event.attempt for event in seen] == [1] * 6
    assert tail.done
    assert lab.read() == seen


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_h37_a_late_reader_gets_the_replay_and_the_end(end: str, lab: Lab) -> None:
    finished(lab, end)
    events = lab.read()
    assert types(events)[:3] == ["chunk"] * 3
    assert events[-1].type == lab.get().status
    assert len(events) == 4


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_h37_resuming_with_the_last_cursor_gives_the_end_and_with_the_end_nothing(end: str, lab: Lab) -> None:
    finished(lab, end)
    *_, last, terminal = lab.read()
    assert lab.read(after=last.id) == [terminal]
    tail = lab.tail(after=terminal.id)
    assert lab.drain(tail) == []
    assert tail.done


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
@pytest.mark.parametrize("after", ["start", "middle", "end"])
def test_h37_the_end_comes_from_the_record_when_the_events_have_expired(after: str, end: str, lab: Lab) -> None:
    lab.now = None  # type: ignore[assignment]  # the server's clock, so that the end's id and its time agree
    finished(lab, end)
    events = lab.read()
    lab.raw("DEL", lab.keys.events("job-a"))
    cursor = {"start": None, "middle": events[1].id, "end": events[-1].id}[after]
    tail = lab.tail(after=cursor)
    shown = lab.drain(tail)
    assert tail.done
    if after == "end":
        assert shown == []
    else:
        assert types(shown) == [lab.get().status]
        assert shown[0].id == f"{lab.record()['finishedAt']}-0" == events[-1].id
        assert lab.read(after=shown[0].id) == []


@pytest.mark.parametrize("after", [None, "1-1", "latest"])
def test_h37_an_unknown_job_is_told_at_once(after: str | None, lab: Lab) -> None:
    finished(lab)
    lab.raw("DEL", lab.keys.job("job-a"), lab.keys.events("job-a"))
    for id in ("job-a", "never"):
        tail = lab.tail(id, after=after)
        with pytest.raises(JobNotFoundError) as missing:
            lab.drain(tail)  # which would stop at the first pause
        assert missing.value.job_id == id


def test_h39_a_result_of_null_is_an_end(lab: Lab) -> None:
    lab.running().complete("null")
    [end] = lab.read()
    assert (end.type, end.result) == ("completed", None)  # type: ignore[union-attr]
    lab.raw("DEL", lab.keys.events("job-a"))
    [end] = lab.read()
    assert (end.type, end.result) == ("completed", None)  # type: ignore[union-attr]


def test_a_job_that_vanishes_under_its_watcher_is_told(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    tail = lab.tail()
    lab.drain(tail)
    lab.raw("DEL", lab.keys.job("job-a"))
    with pytest.raises(JobNotFoundError):
        quiet(lab, tail, 5)


def test_h33_empty_chunks_and_blanks_come_as_they_are(lab: Lab) -> None:
    job = lab.running()
    texts = ["", " ", " hello", "hello ", "\t", "\n", "a\r\nb", "\x00", "🙂"]
    job.emit(*texts)
    job.complete()
    assert [event.data for event in lab.read() if event.type == "chunk"] == texts


# -- ends that were lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
@pytest.mark.parametrize("reader", ["live", "fresh", "resumed"])
def test_a_lost_end_is_made_up_from_the_record(reader: str, end: str, lab: Lab) -> None:
    lab.enqueue()
    job = lab.one()
    job.emit("a", "b")
    tail = lab.tail()
    before = lab.drain(tail)
    lab.now += 1
    if end == "cancel":
        lab.cancel()
        job.complete()
    else:
        getattr(job, end)('"body"')
    terminal = lab.entries()[-1][0]
    lab.raw("XDEL", lab.keys.events("job-a"), terminal)
    if reader == "fresh":
        tail, before = lab.tail(), []
    elif reader == "resumed":
        tail = lab.tail(after=before[-1].id)
    for _ in range(20):
        before += lab.drain(tail)
        if tail.done:
            break
    assert types(before) == ["chunk", "chunk", lab.get().status]
    assert tail.cursor == before[-1].id
    if end != "cancel":
        assert getattr(before[-1], "result" if end == "complete" else "error").strip('"') == "body"
    # Its id is a cursor like any other: at the end, not in front of what was read, not another stream's.
    assert lab.read(after=tail.cursor) in ([], before)
    assert _order(tail.cursor) > _order(before[-2].id)


def test_a_made_up_end_lies_above_what_was_read(lab: Lab) -> None:
    """Also of a job that was over in the millisecond it was made in, or whose life is numbered ahead of the clock."""
    job = lab.running()
    job.emit("a", "b")
    job.complete()
    lab.raw("XDEL", lab.keys.events("job-a"), lab.entries()[-1][0])
    tail = lab.tail()
    seen = [event for _ in range(9) if not tail.done for event in lab.drain(tail)]
    assert types(seen) == ["chunk", "chunk", "completed"]
    assert _order(seen[2].id) > _order(seen[1].id)


def test_an_end_between_the_empty_read_and_the_look_at_the_record_is_not_made_up(lab: Lab) -> None:
    job = lab.running()
    tail = lab.tail()
    assert lab.step(tail) == []  # nothing yet; the record comes next
    job.emit("late")
    job.complete()
    assert text_of(events := lab.drain(tail)) == "late"
    assert types(events) == ["chunk", "completed"]
    assert events[-1].id == lab.entries()[-1][0]


def test_a_revival_between_the_look_at_the_record_and_the_stream_is_followed(lab: Lab) -> None:
    job = lab.running()
    job.fail()
    terminal = lab.entries()[-1][0]
    tail = lab.tail(after=terminal)
    assert lab.step(tail) == []
    assert lab.step(tail) == []  # the record: failed
    lab.now += 10
    lab.retry_dead()
    assert types(lab.drain(tail)) == ["restarted"]
    assert not tail.done


def _order(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


# -- gaps ------------------------------------------------------------------------------------------------------------


def numbered(job: Holder, start: int, stop: int) -> None:
    for low in range(start, stop, 50):
        job.emit(*(f"{n} " for n in range(low, min(low + 50, stop))))


def test_h34_late_readers_are_told_of_what_was_trimmed(lab: Lab) -> None:
    lab.enqueue()
    job = lab.one()
    live, seen = lab.tail(), []
    for start in range(0, 2000, 100):
        numbered(job, start, start + 100)
        seen += lab.drain(live)
        if start == 400:
            cursor = seen[-1].id
        lab.raw("XTRIM", lab.keys.events("job-a"), "MAXLEN", 300)
    job.complete('"all"')
    seen += lab.drain(live)
    assert text_of(seen) == "".join(f"{n} " for n in range(2000))
    assert "gap" not in types(seen)
    for reader in (lab.read(), lab.read(after=cursor), lab.read(limit=7), lab.read(after=cursor, limit=1)):
        assert types(reader) == ["gap", *["chunk"] * 300, "completed"]
        assert reader[0].first_available == reader[1].id  # type: ignore[union-attr]
        assert text_of(reader) == "".join(f"{n} " for n in range(1700, 2000))


def test_a_gap_is_told_again_to_a_reader_that_was_cut_at_it(lab: Lab) -> None:
    job = lab.running()
    numbered(job, 0, 100)
    cursor = lab.entries()[4][0]
    lab.raw("XTRIM", lab.keys.events("job-a"), "MAXLEN", 10)
    gap = lab.read(after=cursor)[0]
    assert (gap.type, gap.id) == ("gap", cursor)
    assert types(lab.read(after=gap.id)) == ["gap", *["chunk"] * 10]


def test_one_trimmed_event_is_a_gap(lab: Lab) -> None:
    lab.running().emit("a", "b")
    lab.raw("XTRIM", lab.keys.events("job-a"), "MAXLEN", 1)
    assert types(lab.read()) == ["gap", "chunk"]


def test_a_gap_in_the_middle_and_one_before_the_end(lab: Lab) -> None:
    """As a failover leaves them: entries that a holder believed written are not there."""
    job = lab.running()
    job.emit(*"abcdef")
    ids = [id for id, _ in lab.entries()]
    lab.raw("XDEL", lab.keys.events("job-a"), ids[2], ids[5])
    job.complete()
    events = lab.read()
    assert types(events) == ["chunk", "chunk", "gap", "chunk", "chunk", "gap", "completed"]
    assert events[2].first_available == ids[3]  # type: ignore[union-attr]
    assert types(lab.read(after=ids[4])) == ["gap", "completed"]


def test_no_gap_where_nothing_is_missing(lab: Lab) -> None:
    """Silent jobs, used ids, later attempts, attempts that emitted nothing."""
    lab.running().complete()
    assert types(lab.read()) == ["completed"]
    lab.running().complete()
    assert types(lab.read()) == ["restarted", "completed"]
    job = lab.running()
    job.emit("a", "b")
    job.retry()
    lab.one().retry()
    lab.one().complete()
    assert types(lab.read()) == ["restarted", "completed"]


# -- restarts --------------------------------------------------------------------------------------------------------


def test_h06_a_watcher_clears_once_and_gets_only_the_new_attempt(lab: Lab) -> None:
    lab.enqueue()
    tail = lab.tail()
    job = lab.one()
    job.emit("a", "b")
    seen = lab.drain(tail)
    lab.lapse()
    job = lab.one(worker="w2")
    job.emit("c")
    seen += lab.drain(tail)
    job.emit("d")
    job.complete()
    seen += lab.drain(tail)
    assert types(seen) == ["chunk", "chunk", "restarted", "chunk", "chunk", "completed"]
    assert [event.attempt for event in seen] == [1, 1, 2, 2, 2, 2]
    assert text_of(seen) == "cd"


def test_a_restart_whose_marker_was_trimmed_is_inferred(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    job.fail()
    cursor = lab.entries()[0][0]
    lab.now += 10
    lab.retry_dead()
    lab.one().emit("b", "c")
    marker = lab.entries()[0][0]
    lab.raw("XDEL", lab.keys.events("job-a"), marker)
    events = lab.read(after=cursor)
    assert types(events) == ["restarted", "chunk", "chunk"]
    assert events[0].id == cursor
    lab.raw("XTRIM", lab.keys.events("job-a"), "MAXLEN", 1)
    assert types(lab.read(after=cursor)) == ["restarted", "gap", "chunk"]
    assert types(lab.read()) == ["gap", "chunk"]


def test_a_restart_within_one_numbering_that_was_trimmed_is_a_gap(lab: Lab) -> None:
    job = lab.running()
    job.emit("a", "b")
    cursor = lab.entries()[0][0]
    job.retry()
    lab.one().emit("c", "d")
    lab.raw("XTRIM", lab.keys.events("job-a"), "MAXLEN", 1)
    events = lab.read(after=cursor)
    assert types(events) == ["gap", "chunk"]
    assert text_of(events) == "d"
    assert events[1].attempt == 2


def test_an_attempt_that_found_a_marker_in_place_is_a_restart_all_the_same(lab: Lab) -> None:
    lab.running().retry()
    lab.one().retry()  # silent: its marker is the latest entry
    lab.one().emit("a")
    events = lab.read()
    assert [(event.type, event.attempt) for event in events] == [("restarted", 2), ("restarted", 3), ("chunk", 3)]


def foreign(lab: Lab, *entries: tuple[str, str]) -> list[str]:
    """Entries as a foreign worker writes them: ids of the server, no attempt."""
    return [lab.raw("XADD", lab.keys.events("job-a"), "*", "t", kind, "d", text) for kind, text in entries]


def test_foreign_entries_need_not_join_on_and_only_their_markers_count(lab: Lab) -> None:
    lab.running()
    foreign(lab, ("chunk", "a"), ("chunk", "b"))
    lab.raw("XADD", lab.keys.events("job-a"), "1900000000000-7", "t", "chunk", "d", "c")
    foreign(lab, ("usage", "{}"), ("progress", "0.3333333333333333"), ("progress", "1e-7"), ("progress", "much"))
    events = lab.read()
    assert types(events) == ["chunk", "chunk", "chunk", "progress", "progress"]
    assert [event.value for event in events[3:]] == [1 / 3, 1e-7]  # type: ignore[union-attr]
    ids = foreign(lab, ("restarted", "2"), ("chunk", "d"), ("completed", '"x"'))
    assert text_of(lab.read()) == "d"
    assert types(lab.read(after=ids[0])) == ["chunk", "completed"]
    assert lab.read(after=ids[0])[0].attempt == 1  # all that an entry without `a` says of itself
    assert lab.read()[-2].attempt == 2


def test_kinds_of_later_versions_are_skipped_and_still_counted(lab: Lab) -> None:
    job = lab.running()
    job.flush(("chunk", "a"), ("audio", "..."), ("data", "not json"), ("data", "[" * 100_000), ("chunk", "b"))
    assert types(lab.read()) == ["chunk", "chunk"]
    assert lab.read(limit=1) == lab.read()


# -- lives of one id -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["enqueue", "retry_dead"])
def test_h35_an_old_cursor_never_joins_two_lives(again: str, lab: Lab) -> None:
    job = lab.running("chat")
    job.emit(*(f"old{n} " for n in range(20)))
    (job.fail if again == "retry_dead" else job.complete)()
    cursors = [event.id for event in lab.read("chat")]
    lab.now += 10
    assert lab.retry_dead("chat") if again == "retry_dead" else lab.enqueue("chat")

    def readers() -> list[str]:
        found = []
        for cursor in cursors:
            events = lab.read("chat", after=cursor)
            assert events[0].type == "restarted"
            found.append(text_of(events))
        return found

    assert set(readers()) == {""}
    job = lab.one("chat")
    for n in range(5):
        job.emit(f"new{n} ")
        assert set(readers()) == {"".join(f"new{m} " for m in range(n + 1))}
    job.complete()
    assert set(readers()) == {"new0 new1 new2 new3 new4 "}


def test_h35_nor_after_a_foreign_reuse_which_deletes_the_stream(lab: Lab) -> None:
    """wire.md §1.5: record and stream are dropped, and no marker is written."""
    job = lab.running()
    job.emit("old1", "old2")
    live = lab.tail()
    assert text_of(lab.drain(live)) == "old1old2"
    job.complete()
    cursors = [event.id for event in lab.read()]
    lab.raw("DEL", lab.keys.job("job-a"), lab.keys.events("job-a"))
    lab.now += 5
    lab.raw("HSET", lab.keys.job("job-a"), "id", "job-a", "payload", "{}", "status", "waiting", "attempt", "0")
    lab.raw("ZADD", lab.keys.ready, 1, "job-a")
    for cursor in cursors:
        assert types(lab.read(after=cursor)) == ["gap"]
    job = lab.one()
    job.emit("new")
    for cursor in cursors:
        assert types(lab.read(after=cursor)) == ["restarted", "chunk"]
    assert types(lab.drain(live)) == ["restarted", "chunk"]


# -- cursors ---------------------------------------------------------------------------------------------------------

GARBAGE = [
    "abc",
    "$",
    "+",
    "-",
    ">",
    "*",
    "5-",
    "-5",
    "-1-1",
    "1-1-1",
    "1.5",
    "1e3",
    " 1-1",
    "1-1 ",
    "1-1\n",
    "99999999999999999999-0",
    "18446744073709551616-0",
    "0-18446744073709551616",
    "１-１",
    "٣",
    "9" * 10_000,
    "0x10",
    "Latest",
    5,
    True,
    1.5,
    b"1-1",
    [],
]


@pytest.mark.parametrize("after", GARBAGE, ids=lambda after: repr(after)[:24])
def test_h36_garbage_cursors_are_refused_before_anything_is_sent(after: Any, keys: Keys) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Tail(keys, "x", Queue(keys.name), after=after)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("after", "cursor"),
    [
        (None, "0-0"),
        ("", "0-0"),
        ("0", "0-0"),
        ("0-0", "0-0"),
        ("00", "0-0"),
        ("5", "5-0"),
        ("007-08", "7-8"),
        ("18446744073709551615-18446744073709551615", "18446744073709551615-18446744073709551615"),
    ],
)
def test_h36_what_is_a_cursor(after: str | None, cursor: str) -> None:
    assert check_cursor(after) == cursor


FUTURE = ["18446744073709551615-18446744073709551615", "9000000000000-0", "9000000000000-5"]


@pytest.mark.parametrize("cursor", FUTURE)
@pytest.mark.parametrize("state", ["waiting", "silent", "streaming", "completed", "failed", "revived"])
def test_h36_a_cursor_from_the_future_is_answered_and_starts_over(state: str, cursor: str, lab: Lab) -> None:
    lab.enqueue()
    job = None if state == "waiting" else lab.one()
    if job and state != "silent":
        job.emit("a", "b")
        if state in ("failed", "revived"):
            job.fail()
        if state == "completed":
            job.complete()
    if state == "revived":
        lab.now += 10
        lab.retry_dead()
        job = lab.one()
        job.emit("c")
    tail = lab.tail(after=cursor)
    events = []
    for _ in range(3):
        events += lab.drain(tail)
    assert types(events)[0] == "gap"
    if not tail.done:
        (job or lab.one()).emit("d")
        (job or lab.one()).complete() if job else None
        events += lab.drain(tail)
    expected = {"waiting": "d", "silent": "d", "streaming": "abd", "completed": "ab", "failed": "ab", "revived": "cd"}
    assert text_of(events) == expected[state]
    assert types(events).count("gap") == 1


def test_a_cursor_from_the_future_is_told_of_one_gap_and_of_later_ones(lab: Lab) -> None:
    job = lab.running()
    job.emit(*"abcdef")
    ids = [id for id, _ in lab.entries()]
    lab.raw("XDEL", lab.keys.events("job-a"), ids[0], ids[3])
    events = lab.read(after=FUTURE[0])
    assert types(events) == ["gap", "chunk", "chunk", "gap", "chunk", "chunk"]
    assert (events[0].id, events[0].attempt) == ("0-0", 1)
    assert lab.read(after=events[0].id)[0].type == "gap"


def test_h36_a_cursor_of_another_job_starts_over(lab: Lab) -> None:
    lab.running("first").complete()
    lab.now += 60_000
    other = lab.running("second")
    other.emit("x")
    other.complete()
    for event in lab.read("second"):
        events = lab.read("first", after=event.id)
        assert types(events) == ["gap", "completed"]
    [end] = lab.read("first")
    assert text_of(lab.read("second", after=end.id)) == "x"


def test_a_failover_that_lost_the_newest_entries_makes_their_cursors_start_over(lab: Lab) -> None:
    job = lab.running()
    job.emit("a", "b", "c")
    cursor = lab.entries()[-1][0]
    lab.raw("XDEL", lab.keys.events("job-a"), cursor)
    assert types(lab.read(after=cursor)) == ["gap", "chunk", "chunk"]


def test_latest_begins_with_what_is_still_to_come(lab: Lab) -> None:
    lab.enqueue()
    job = lab.one()
    job.emit("a", "b")
    tail = lab.tail(after="latest")
    assert lab.drain(tail) == []
    job.emit("c")
    assert [event.data for event in lab.drain(tail)] == ["c"]  # type: ignore[union-attr]
    job.retry()
    lab.one().emit("d")
    assert types(lab.drain(tail)) == ["restarted", "chunk"]


def test_latest_of_a_finished_job_is_its_end_and_of_a_waiting_one_everything(lab: Lab) -> None:
    finished(lab)
    tail = lab.tail(after="latest")
    [end] = lab.step(tail)
    assert (end.type, end.id, tail.done) == ("completed", lab.entries()[-1][0], True)
    lab.enqueue("waits")
    tail = lab.tail("waits", after="latest")
    assert lab.drain(tail) == []
    lab.one("waits").emit("a")
    assert types(lab.drain(tail)) == ["chunk"]


def test_latest_knows_which_attempt_it_has_come_to(lab: Lab) -> None:
    lab.running().retry()
    lab.one().emit("a")
    tail = lab.tail(after="latest")
    assert lab.drain(tail) == []
    foreign(lab, ("chunk", "b"))
    assert [event.attempt for event in lab.drain(tail)] == [2]


def test_nothing_comes_after_the_end(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    job.complete()
    foreign(lab, ("chunk", "stray"))
    assert types(lab.read()) == ["chunk", "completed"]


# -- cut and resumed -------------------------------------------------------------------------------------------------


def life(lab: Lab) -> list[Callable[[], Any]]:
    """Everything that can happen to the output of one id, step by step."""
    held: list[Holder] = []

    def take() -> None:
        held.append(lab.one())

    def holder(act: Callable[[Holder], Any]) -> Callable[[], Any]:
        return lambda: act(held[-1])

    def later(act: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            lab.now += 10
            act()

        return step

    return [
        lambda: lab.enqueue(max_attempts=6),
        take,
        holder(lambda job: job.emit("a1 ", "a2 ")),
        holder(lambda job: job.progress("0.5")),
        holder(lambda job: job.emit("a3 ")),
        holder(lambda job: job.retry()),
        take,
        holder(lambda job: job.emit("b1 ")),
        holder(lambda job: job.release()),
        take,
        holder(lambda job: job.emit("c1 ", "c2 ")),
        lab.lapse,
        take,
        lab.lapse,
        take,
        holder(lambda job: job.emit("d1 ")),
        holder(lambda job: job.fail()),
        later(lab.retry_dead),
        take,
        holder(lambda job: job.emit("e1 ", "e2 ")),
        holder(lambda job: job.complete()),
        later(lab.enqueue),
        take,
        holder(lambda job: job.emit("f1 ", "f2 ")),
        holder(lambda job: job.flush(("data", "{}"), ("chunk", "f3 "))),
        holder(lambda job: job.complete('"f"')),
    ]


@pytest.mark.parametrize("lag", [0, 1, 2, 4, 9, 99])
def test_a_reader_that_is_cut_after_any_event_and_resumed_has_the_same_text(lag: int, lab: Lab) -> None:
    """For every n: cut after n events, resume `lag` steps of the job's life later, once more cut and resumed then."""
    steps = life(lab)
    readers: list[tuple[int, list[Any], list[str]]] = []  # step of the cut, what it had, ids of the life then
    live: list[Any] = []
    tail: Tail[Any] | None = None
    done: list[list[Any]] = []
    for index, step in enumerate(steps):
        step()
        if tail is None or tail.done:
            tail = lab.tail(after=live[-1].id if live else None)
        for event in lab.drain(tail):
            live.append(event)
            readers.append((index, list(live), []))
        for at, had, _ in readers:
            if index == min(at + lag, len(steps) - 1):
                resumed = lab.tail(after=had[-1].id, limit=1)
                had += lab.step(resumed)  # one event, or the markers that come with it; then cut again
        done = [had for _, had, _ in readers]
    assert len(done) > 20
    for had in done:
        events = had + lab.read(after=had[-1].id)
        assert text_of(events) == "f1 f2 f3 "
        assert events[-1].type == "completed"
        assert events[-1].result == "f"
        # Each event came once: what was not dropped by a marker is a run without repeats.
        ids = [event.id for event in events if event.type == "chunk"]
        assert len(ids) == len(set(ids))


# -- pages, waiting, regions -----------------------------------------------------------------------------------------


def test_a_long_output_is_read_in_pages_without_a_pause(lab: Lab) -> None:
    job = lab.running()
    numbered(job, 0, 1200)
    tail = lab.tail()
    call = tail.poll()
    assert call.args[:3] == ("XREAD", "COUNT", "500")
    pages = []
    while not tail.delay:
        pages.append(len(lab.step(tail)))
    assert pages == [500, 500, 200]


def test_wait_reads_the_record_first(lab: Lab) -> None:
    finished(lab)
    tail = lab.tail(record_first=True)
    assert tail.poll().args[0] == "HMGET"
    assert types(lab.step(tail)) == ["completed"]
    assert tail.done


def test_wait_without_blocking_reads_records_alone(lab: Lab) -> None:
    lab.enqueue()
    tail = lab.tail(record_first=True)
    for _ in range(5):
        assert tail.poll().args[0] == "HMGET"
        assert lab.step(tail) == []
        assert tail.delay > 0
    job = lab.one()
    job.emit("a")
    assert lab.step(tail) == []
    job.complete("1")
    assert types(lab.step(tail)) == ["completed"]


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_wait_with_blocking_skips_the_output_and_sees_the_end(end: str, lab: Lab) -> None:
    lab.now = None  # type: ignore[assignment]  # the server's clock, so that ids of ends lie above the output
    job = lab.running()
    job.emit("a")
    tail = lab.tail(record_first=True, blocking=True)
    for _ in range(4):
        assert lab.step(tail) == []
    job.emit("b")
    assert tail.poll().args[0] == "XREAD"
    assert lab.step(tail) == []
    if end == "cancel":
        lab.cancel()
        job.complete()
    else:
        getattr(job, end)()
    events: list[Any] = []
    for _ in range(10):
        events += lab.step(tail)
        if tail.done:
            break
    assert types(events)[-1] == lab.get().status
    assert "chunk" not in types(events)


def test_wait_with_blocking_is_woken_by_ends_that_the_stream_hides(lab: Lab) -> None:
    """A life that is numbered ahead of the clock has its end below what the wait skipped to: the record tells."""
    job = lab.running()
    job.emit("a")
    tail = lab.tail(record_first=True, blocking=True)
    for _ in range(4):
        assert lab.step(tail) == []
    job.complete()
    events: list[Any] = []
    for _ in range(4):
        events += tail.feed(lab.send(tail.poll(block=0.001)))
        if tail.done:
            break
    assert types(events) == ["completed"]


def test_with_read_regions_an_unknown_job_is_believed_after_three_seconds(lab: Lab) -> None:
    tail = lab.tail(read_regions=True)
    assert len(quiet(lab, tail, 2.9)) < 12
    with pytest.raises(JobNotFoundError):
        quiet(lab, tail, 1.5)


def test_with_read_regions_a_job_that_arrives_late_is_followed(lab: Lab) -> None:
    tail = lab.tail(read_regions=True)
    for _ in range(4):
        assert lab.step(tail) == []
    lab.running().emit("a")
    events: list[Any] = []
    for _ in range(4):
        events += lab.step(tail)
    assert types(events) == ["chunk"]


# -- pace ------------------------------------------------------------------------------------------------------------


def quiet(lab: Lab, tail: Tail[Any], seconds: float) -> list[tuple[float, str]]:
    """The commands that a tail sends while nothing happens: when, and which."""
    at, sent = 0.0, []
    while at < seconds:
        call = tail.poll()
        sent.append((at, call.args[0]))
        assert tail.feed(lab.send(call)) == []
        at += tail.delay
    return sent


def test_h69_a_quiet_reader_sends_at_most_one_command_in_two_seconds(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    tail = lab.tail()
    lab.drain(tail)
    sent = quiet(lab, tail, 300)
    late = [at for at, _ in sent if at > 15]
    assert all(second - first >= 2.0 for first, second in itertools.pairwise(late))
    assert len(late) <= 143
    names = [name for _, name in sent]
    assert len(names) / 6 - 1 <= names.count("HMGET") <= len(names) / 4
    first = [at for at, _ in sent if at <= 10]
    assert 15 <= len(first) <= 40


def test_a_resumed_reader_looks_once_whether_its_cursor_is_of_this_stream(lab: Lab) -> None:
    lab.running().emit("a")
    sent = quiet(lab, lab.tail(after=lab.entries()[0][0]), 60)
    assert [name for _, name in sent[:4]] == ["XREAD", "HMGET", "XREVRANGE", "XREAD"]
    assert sent[3][0] > sent[2][0] == 0
    assert [name for _, name in sent].count("XREVRANGE") == 1


def test_h69_nor_does_one_that_waits_for_a_job_to_start(lab: Lab) -> None:
    lab.enqueue()
    sent = quiet(lab, lab.tail(), 120)
    assert sum(1 for at, _ in sent if at > 15) <= 54
    sent = quiet(lab, lab.tail(record_first=True), 120)
    assert sum(1 for at, _ in sent if at > 15) <= 54


@pytest.mark.parametrize("where", ["the queue", "the job"])
def test_a_quiet_reader_comes_by_several_times_within_the_life_of_a_result(lab: Lab, where: str) -> None:
    """Otherwise a job could end and expire between two polls, and its reader would be told that it never was."""
    if where == "the queue":
        lab.queue = Queue(lab.keys.name, result_ttl=2)
        lab.enqueue()
    else:
        lab.enqueue(extra=[("resultTtlMs", "2000")])
    sent = [at for at, _ in quiet(lab, lab.tail(), 60)]
    assert max(second - first for first, second in itertools.pairwise(sent)) <= 2 / 3


def test_data_makes_the_reader_fast_again(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    tail = lab.tail()
    lab.drain(tail)
    quiet(lab, tail, 60)
    assert tail.delay >= 2.0
    job.emit("b")
    for _ in range(2):
        if lab.step(tail):
            break
    assert 0.1 < tail.delay < 0.3


def test_a_reader_that_has_had_data_asks_for_nothing_but_more_of_it(lab: Lab) -> None:
    """Neither whether the job exists nor whether the cursor is of its stream: the data has told both."""
    job = lab.running()
    job.emit("a", "b")
    tail = lab.tail(after=lab.entries()[0][0])
    assert types(lab.step(tail)) == ["chunk"]
    sent = [name for _, name in quiet(lab, tail, 1.2)]
    assert set(sent) == {"XREAD"}
    job.emit("c")
    assert types(lab.step(tail)) == ["chunk"]


def test_a_fixed_pace_is_kept(lab: Lab) -> None:
    lab.enqueue()
    tail = lab.tail(poll=1.25)
    delays = set()
    for _ in range(20):
        lab.step(tail)
        delays.add(tail.delay)
    assert delays == {0.0, 1.25}
    assert len(quiet(lab, lab.tail(poll=1.25), 100)) <= 82


def test_two_readers_do_not_keep_step(lab: Lab) -> None:
    lab.enqueue()
    first, second = (quiet(lab, lab.tail(), 60) for _ in range(2))
    assert [at for at, _ in first] != [at for at, _ in second]


def test_a_read_waits_on_the_server_once_the_job_is_known(lab: Lab) -> None:
    tail = lab.tail("unknown")
    assert not tail.blocks
    assert "BLOCK" not in tail.poll(block=5).args
    lab.enqueue()
    tail = lab.tail()
    lab.step(tail)
    assert not tail.blocks
    lab.step(tail)
    assert tail.blocks
    call = tail.poll(block=0.02)
    assert call.args[3:5] == ("BLOCK", "20")
    assert tail.feed(lab.send(call)) == []
    # It has waited on the server: the look at the record comes at once, and then it waits there again.
    assert tail.delay == 0
    assert tail.poll().args[0] == "HMGET"
    lab.step(tail)
    assert tail.blocks


def test_a_result_that_cannot_be_read_is_told_after_the_output(lab: Lab) -> None:
    job = lab.running()
    job.emit("a", "b")
    job.complete("not json")
    tail = lab.tail()
    assert text_of(lab.step(tail)) == "ab"
    assert tail.delay == 0
    for _ in range(2):
        with pytest.raises(ReplyShapeError):
            lab.step(tail)
    assert tail.cursor == lab.entries()[1][0]


# -- replies that are not replies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [5, "x", [1], [["s"]], [["s", 5]], [["s", [["1-1"]]]], {}, [["s", []], ["t", []]]])
def test_a_reply_of_another_shape_is_an_error_of_ours(reply: Any, keys: Keys) -> None:
    tail: Tail[Any] = Tail(keys, "x", Queue(keys.name))
    with pytest.raises(ReplyShapeError):
        tail.poll().decode(reply)


@pytest.mark.parametrize("reply", [None, []])
def test_nothing_new_has_two_spellings(reply: Any, keys: Keys) -> None:
    assert Tail(keys, "x", Queue(keys.name)).poll().decode(reply) == []


def test_replies_may_be_text_or_bytes(keys: Keys) -> None:
    for entry in (
        ["1-1", ["t", "chunk", "d", "é", "a", "1"]],
        [b"1-1", [b"t", b"chunk", b"d", "é".encode(), b"a", b"1"]],
    ):
        tail: Tail[Any] = Tail(keys, "x", Queue(keys.name))
        [event] = tail.feed(tail.poll().decode([["s", [entry]]]))
        assert (event.type, event.data, event.attempt) == ("chunk", "é", 1)  # type: ignore[union-attr]


def test_bytes_that_are_not_text_do_not_end_a_reader(lab: Lab) -> None:
    lab.running()
    lab.raw("XADD", lab.keys.events("job-a"), "*", "t", "chunk", "d", b"a\xff\xfeb")
    [event] = lab.read()
    assert event.data == "a\ufffd\ufffdb"  # type: ignore[union-attr]
