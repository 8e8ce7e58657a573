"""What a worker takes, runs and says: every rule of `worker.machine`, without a world."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.worker.conversation import MS, Conversation, an_assign, joined

from ekiden import limits
from ekiden.limits import NS
from ekiden.machine import Close, Dial, Disconnected, Log
from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Note, Route, Spec
from ekiden.wire.messages import (
    Ack,
    Acked,
    AckRun,
    Assign,
    AssignRun,
    Beat,
    Bye,
    CacheAck,
    CacheOffer,
    Credit,
    Failure,
    Join,
    Peek,
    Peeked,
    Progress,
    Refusal,
    Stop,
)
from ekiden.worker.credit import CREDIT_MAX, STALL_NS
from ekiden.worker.ledger import MEMORY_ATTEMPTS, MEMORY_NS
from ekiden.worker.machine import (
    Abort,
    CacheSaid,
    CachesOffered,
    Drain,
    Dropped,
    Exit,
    Gone,
    LoadMeasured,
    Look,
    ProgressMade,
    Run,
    RunFinished,
    Seen,
    Started,
)


def finished(run: AssignRun, **more: Any) -> RunFinished:
    offsets = range(run.first, run.first + len(run.ids))
    return RunFinished(run.grant, offsets, list(run.bodies), **more)


def a_join(held: list[tuple[int, list[int]]] | None = None, credit: int = 4) -> Join:
    return Join(["job.assign.>"], 2, credit, {"zone": "b"}, 2000, 4000, "h1", held or [])


class an_abort:
    """An `Abort` of these, whatever their spec."""

    def __init__(self, grant: int, offsets: list[int], why: str) -> None:
        self.told = (grant, offsets, why)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Abort) and self.told == (other.grant, other.offsets, other.why)

    def __repr__(self) -> str:
        return f"an_abort{self.told}"


def runs_of(effects: list[Any]) -> list[AssignRun]:
    return [effect.run for effect in effects if isinstance(effect, Run)]


def offsets_of(effects: list[Any]) -> list[tuple[int, int]]:
    return [(run.grant, run.first + at) for run in runs_of(effects) for at in range(len(run.ids))]


# ------------------------------------------------------------------ joining


def test_a_welcome_is_answered_with_a_join_and_a_beat() -> None:
    talk = Conversation()

    effects = talk.connect()

    assert effects == [talk.said(a_join(), Beat())]
    assert talk.machine.connected


def test_a_broken_connection_is_dialled_again_after_a_jittered_pause() -> None:
    talk = joined()
    talk.hear(Beat())

    assert talk.turn(Disconnected(talk.conn, "reset")) == []

    pause = limits.RECONNECT_FIRST_NS * 3 // 4  # half of it, and half of the rest: jitter is 0.5
    assert talk.machine.next_deadline() == talk.now + pause
    assert talk.turn(after_ns=pause) == [Dial("a:7000")]


def test_a_silent_broker_is_dropped() -> None:
    talk = joined()
    talk.hear(Beat())

    effects = talk.quiet(15 * NS + limits.RECONNECT_FIRST_NS)

    assert [effect for effect in effects if not hasattr(effect, "frames")] == [
        Close(talk.conn, "silent for 15 s"),
        Dial("a:7000"),
    ]


def test_garbage_in_an_assign_ends_the_connection_and_nothing_else() -> None:
    talk = joined()
    talk.hear(Beat())
    uneven = AssignRun(1, 0, an_assign(1).spec, "ci", ["a", "b"], [b""])

    effects = talk.hear(Assign([uneven]), Assign([an_assign(2)]))

    assert effects == [
        Close(talk.conn, "malformed Assign: its columns differ in length"),
    ]
    assert talk.machine.held == []


# ------------------------------------------------------------------ running


def test_a_grant_that_ends_in_one_go_is_acked_as_a_whole() -> None:
    talk = joined()
    run = an_assign(7, 3)

    assert talk.hear(Assign([run])) == [Run(run, Spec("echo", Route("job.assign.echo")))]
    assert talk.turn(finished(run)) == [
        talk.said((1, Ack([AckRun(7, None, [b"g7o0", b"g7o1", b"g7o2"])])))
    ]
    assert talk.machine.held == [(7, [0, 1, 2])]
    assert talk.hear(Acked(1)) == []
    assert talk.machine.held == []


def test_outcomes_of_one_turn_share_one_ack() -> None:
    talk = joined()
    one, two = an_assign(1, 2), an_assign(2, 1)
    talk.hear(Assign([one, two]))

    effects = talk.turn(
        RunFinished(1, [1], [b"x"], {1: Note(ran_ns=5)}),
        RunFinished(1, (), [], {}, [Failure(0, "handler_error", "boom")]),
        finished(two),
    )

    assert effects == [
        talk.said((1, Ack([
            AckRun(1, [1], [b"x"], {1: Note(ran_ns=5)}),
            AckRun(1, [], [], {}, [Failure(0, "handler_error", "boom")]),
            AckRun(2, None, [b"g2o0"]),
        ])))
    ]  # fmt: skip


def test_a_part_of_a_grant_is_never_acked_as_the_whole() -> None:
    talk = joined()
    tail = an_assign(3, 2, first=4)
    talk.hear(Assign([tail]))

    assert talk.turn(finished(tail)) == [
        talk.said((1, Ack([AckRun(3, [4, 5], [b"g3o4", b"g3o5"])])))
    ]


def test_acks_are_split_so_that_no_frame_is_over_the_limit() -> None:
    talk = joined()
    run = an_assign(1, 3)
    talk.hear(Assign([run]))
    large = b"x" * limits.PAYLOAD_BYTES_MAX

    effects = talk.turn(RunFinished(1, range(3), [large] * 3))

    acks = [message for said in effects for _, message in said.frames]
    assert [[r.offsets for r in ack.runs] for ack in acks] == [[[0]], [[1]], [[2]]]
    assert talk.machine.held == [(1, [0, 1, 2])]
    talk.hear(Acked(2))
    assert talk.machine.held == [(1, [2])]


def test_a_spec_that_cannot_be_read_fails_its_jobs_and_says_why() -> None:
    talk = joined()
    run = AssignRun(1, 0, msgspec.Raw(b"\x07"), "ci", ["a"], [b""])

    effects = talk.hear(Assign([run]))

    text = "this worker cannot read the job's spec: its release may be too old for it"
    failure = Failure(0, "cannot_start", text)
    assert effects == [talk.said((1, Ack([AckRun(1, [], [], {}, [failure])])))]


# ------------------------------------------------------------------ repeats


def test_an_assign_of_what_runs_is_ignored() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2)]))

    assert talk.hear(Assign([an_assign(1, 2)])) == []


def test_only_the_new_part_of_a_repeated_assign_runs() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2, first=1)]))

    effects = talk.hear(Assign([an_assign(1, 5)]))

    assert offsets_of(effects) == [(1, 0), (1, 3), (1, 4)]


@pytest.mark.parametrize("confirmed", [False, True])
def test_an_assign_of_what_is_finished_is_acked_again_without_running(confirmed: bool) -> None:
    talk = joined()
    run = an_assign(1, 2)
    talk.hear(Assign([run]))
    talk.turn(RunFinished(1, [0], [b"x"], {}, [Failure(1, "handler_error", "boom")]))
    if confirmed:
        talk.hear(Acked(1))

    effects = talk.hear(Assign([run]))

    again = AckRun(1, [0], [b"x"], {}, [Failure(1, "handler_error", "boom")])
    assert effects == [talk.said((2, Ack([again])))]


def test_finished_attempts_are_remembered_for_ten_minutes() -> None:
    talk = joined()
    run = an_assign(1)
    talk.hear(Assign([run]))
    talk.turn(finished(run))
    talk.hear(Acked(1))

    talk.now += MEMORY_NS - 1
    talk.machine.receive(talk.frames(Beat()), talk.now)
    assert runs_of(talk.hear(Assign([run]))) == []
    talk.now += 2 + 2 * NS
    talk.hear(Beat())  # a beat of ours is due, and with it a look at what is old
    assert offsets_of(talk.hear(Assign([run]))) == [(1, 0)]


def test_the_memory_of_finished_attempts_is_bounded() -> None:
    talk = joined()
    size = 250
    last = MEMORY_ATTEMPTS // size + 1
    for grant in range(1, last + 1):
        run = an_assign(grant, size)
        talk.hear(Assign([run]))
        talk.turn(finished(run))
        talk.hear(Acked(grant))

    assert runs_of(talk.hear(Assign([an_assign(last, size)]))) == []
    assert len(offsets_of(talk.hear(Assign([an_assign(1, size)])))) == size


def test_a_late_word_of_the_executor_about_what_is_settled_is_dropped() -> None:
    talk = joined()
    run = an_assign(1, 2)
    talk.hear(Assign([run]))
    talk.hear(Stop(1, [0], "cancel"))
    talk.turn(Gone(1, [0]))

    effects = talk.turn(finished(run))

    assert effects == [talk.said((2, Ack([AckRun(1, [1], [b"g1o1"])])))]


def test_runs_that_end_in_another_order_are_told_with_their_offsets() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 3)]))

    effects = talk.turn(RunFinished(1, [2, 0, 1], [b"two", b"none", b"one"]))

    assert effects == [talk.said((1, Ack([AckRun(1, [2, 0, 1], [b"two", b"none", b"one"])])))]


# ------------------------------------------------------------------ reconnecting


def test_a_reconnect_joins_with_what_is_held_and_acks_again_what_was_not_confirmed() -> None:
    talk = joined()
    done, open_ = an_assign(1, 2), an_assign(2, 2)
    talk.hear(Assign([done, open_]))
    talk.turn(finished(done))
    talk.turn(Disconnected(talk.conn))
    talk.turn(RunFinished(2, [1], [b"late"]))

    talk.quiet(NS)
    effects = talk.connect(expect_dial=False)

    assert effects == [
        talk.said(
            a_join(held=[(1, [0, 1]), (2, [0, 1])]),
            (3, Ack([AckRun(1, None, [b"g1o0", b"g1o1"])])),
            (4, Ack([AckRun(2, [1], [b"late"])])),
            Beat(),
        )
    ]


def test_an_old_confirmation_does_not_cover_what_is_sent_again() -> None:
    talk = joined()
    run = an_assign(1)
    talk.hear(Assign([run]))
    talk.turn(finished(run))
    talk.turn(Disconnected(talk.conn))
    talk.quiet(NS)
    talk.connect(expect_dial=False)

    talk.hear(Acked(1))
    assert talk.machine.held == [(1, [0])]
    talk.hear(Acked(2))
    assert talk.machine.held == []


# ------------------------------------------------------------------ later attempts


def test_a_later_attempt_is_announced_before_it_runs() -> None:
    talk = joined()
    run = an_assign(1, 3, attempts=[1, 2, 1])

    effects = talk.hear(Assign([run]))

    assert effects[0] == talk.said(Beat([(1, 1, 0)]))
    assert offsets_of(effects[1:]) == [(1, 0), (1, 1), (1, 2)]
    assert [run.attempts for run in runs_of(effects)] == [[], [2], []]


def test_a_later_attempt_waits_for_a_free_slot_and_holds_back_what_came_after_it() -> None:
    talk = joined(slots=2)
    talk.hear(Assign([an_assign(1, 2)]))

    assert talk.hear(Assign([an_assign(2, 1, attempts=[3]), an_assign(3, 1)])) == []

    effects = talk.turn(RunFinished(1, [0], [b""]))
    assert effects[0] == talk.said((1, Ack([AckRun(1, [0], [b""])])), Beat([(2, 0, 0)]))
    assert offsets_of(effects[1:]) == [(2, 0), (3, 0)]


def test_a_later_attempt_does_not_run_unannounced_while_there_is_no_connection() -> None:
    talk = joined(slots=1)
    talk.hear(Assign([an_assign(1, 1)]))
    talk.hear(Assign([an_assign(2, 1, attempts=[2])]))
    talk.turn(Disconnected(talk.conn))

    assert talk.turn(RunFinished(1, [0], [b""])) == []

    talk.quiet(NS)
    effects = talk.connect(expect_dial=False)
    assert effects[0].frames[-1] == (0, Beat([(2, 0, 0)]))
    assert offsets_of(effects[1:]) == [(2, 0)]


# ------------------------------------------------------------------ stops


def test_cancel_ends_what_runs_and_is_confirmed_when_it_is_gone() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 3)]))

    assert talk.hear(Stop(1, [0, 2], "cancel")) == [an_abort(1, [0, 2], "cancel")]
    assert talk.machine.held == [(1, [0, 1, 2])]

    failures = [Failure(0, "cancelled"), Failure(2, "cancelled")]
    assert talk.turn(Gone(1, [0, 2])) == [talk.said((1, Ack([AckRun(1, [], [], {}, failures)])))]


def test_what_finishes_before_it_is_ended_has_finished() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2)]))
    talk.hear(Stop(1, [0], "cancel"))

    assert talk.turn(RunFinished(1, [0], [b"x"])) == [talk.said((1, Ack([AckRun(1, [0], [b"x"])])))]
    assert talk.turn(Gone(1, [0])) == []


def test_an_attempt_is_asked_to_end_once_and_keeps_its_first_cause() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 1, timeout_ns=NS)]))
    talk.turn(Started([(1, 0, talk.now)]))
    talk.hear(Stop(1, [0], "cancel"))

    assert talk.hear(Stop(1, None, "cancel")) == []
    assert [e for e in talk.quiet(1500 * MS) if isinstance(e, Abort)] == []

    confirmed = AckRun(1, [], [], {}, [Failure(0, "cancelled")])
    assert talk.turn(Gone(1, [0])) == [talk.said((1, Ack([confirmed])))]


def test_nobody_is_told_of_the_end_of_what_has_become_stale() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))
    talk.hear(Stop(1, [0], "cancel"))
    talk.hear(Stop(1, None, "stale"))

    assert talk.turn(Gone(1, [0])) == []


def test_cancel_of_a_whole_grant_takes_all_that_is_open() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2)]))
    talk.turn(RunFinished(1, [0], [b""]))

    effects = talk.hear(Stop(1, None, "cancel"))

    assert effects == [an_abort(1, [1], "cancel")]


def test_cancel_of_something_unheard_of_is_confirmed_and_it_never_runs() -> None:
    talk = joined()

    effects = talk.hear(Stop(9, [4], "cancel"))
    confirmed = AckRun(9, [], [], {}, [Failure(4, "cancelled")])
    assert effects == [talk.said((1, Ack([confirmed])))]

    assert talk.hear(Assign([an_assign(9, 1, first=4)])) == [talk.said((2, Ack([confirmed])))]


def test_cancel_of_what_has_finished_changes_nothing() -> None:
    talk = joined()
    run = an_assign(1)
    talk.hear(Assign([run]))
    talk.turn(finished(run))

    assert talk.hear(Stop(1, [0], "cancel")) == []


def test_cancel_of_what_still_waits_here_needs_no_executor() -> None:
    talk = joined(slots=1)
    talk.hear(Assign([an_assign(1), an_assign(2, 1, attempts=[2])]))

    effects = talk.hear(Stop(2, None, "cancel"))

    assert effects == [talk.said((1, Ack([AckRun(2, [], [], {}, [Failure(0, "cancelled")])])))]
    assert talk.turn(RunFinished(1, [0], [b""]))[1:] == []


def test_recall_gives_back_what_the_executor_says_has_not_begun() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 3)]))

    assert talk.hear(Stop(1, None, "recall")) == [an_abort(1, [0, 1, 2], "recall")]
    assert talk.turn(Dropped(1, [1, 2])) == [
        talk.said((1, Ack([AckRun(1, [], [], {}, [], [1, 2])])))
    ]
    assert talk.turn(RunFinished(1, [0], [b"x"])) == [talk.said((2, Ack([AckRun(1, [0], [b"x"])])))]


def test_recall_leaves_what_runs_alone() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 1)]))
    talk.turn(Started([(1, 0, talk.now)]))

    assert talk.hear(Stop(1, None, "recall")) == []


def test_recall_of_what_still_waits_here_gives_it_back_at_once() -> None:
    talk = joined(slots=1)
    talk.hear(Assign([an_assign(1), an_assign(2, 3, attempts=[1, 2, 1])]))

    effects = talk.hear(Stop(2, [0, 2], "recall"))

    assert effects[0] == talk.said((1, Ack([AckRun(2, [], [], {}, [], [2])])))
    assert effects[1:] == [an_abort(2, [0], "recall")]


def test_stale_work_is_ended_and_never_mentioned_again() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2)]))

    assert talk.hear(Stop(1, None, "stale")) == [an_abort(1, [0, 1], "stale")]
    assert talk.turn(finished(an_assign(1, 2))) == []
    assert talk.machine.held == []


def test_a_time_limit_of_the_broker_is_obeyed() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))

    assert talk.hear(Stop(1, [0], "timeout")) == [an_abort(1, [0], "timeout")]

    failure = Failure(0, "timeout", "the broker ended it: over its time limit")
    assert talk.turn(Gone(1, [0])) == [talk.said((1, Ack([AckRun(1, [], [], {}, [failure])])))]


def test_a_time_limit_of_the_broker_for_what_has_not_begun_here_gives_it_back() -> None:
    talk = joined(slots=1)
    talk.hear(Assign([an_assign(1), an_assign(2, 1, attempts=[2])]))

    effects = talk.hear(Stop(2, None, "timeout"))

    assert effects == [talk.said((1, Ack([AckRun(2, [], [], {}, [], [0])])))]


# ------------------------------------------------------------------ being watched


def test_what_an_attempt_has_written_is_told_to_who_asked() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))

    (look,) = talk.hear(Peek(1, 0, 5, -1, 1 << 30))
    assert look == Look(0, 1, 0, 5, 0, limits.INLINE_FILE_BYTES, look.spec)

    assert talk.turn(Seen(0, (b"out", b"err"))) == [talk.said(Peeked(True, b"out", b"err"))]
    assert talk.turn(Seen(0, None)) == [talk.said(Peeked(False))]
    assert talk.hear(Peek(9, 0, 0, 0, 10)) == [talk.said(Peeked(False))]


def test_what_was_asked_on_a_connection_is_not_answered_on_another() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))
    talk.hear(Peek(1, 0, 0, 0, 10))
    talk.turn(Disconnected(talk.conn))
    talk.quiet(NS)
    talk.connect(expect_dial=False)

    assert talk.turn(Seen(0, (b"late", b""))) == []


# ------------------------------------------------------------------ time limits


def test_a_time_limit_counts_from_the_start_of_the_run() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2, timeout_ns=NS)]))
    talk.now += 5 * NS
    talk.hear(Beat())
    talk.turn(Started([(1, 0, talk.now - 20 * MS)]))

    assert talk.quiet(979 * MS) == []
    assert talk.quiet(2 * MS) == [an_abort(1, [0], "timeout")]

    failure = Failure(0, "timeout", "ran longer than its time limit of 1 s")
    assert talk.turn(Gone(1, [0])) == [talk.said((1, Ack([AckRun(1, [], [], {}, [failure])])))]
    assert talk.machine.held == [(1, [0, 1])]


def test_a_run_that_ends_in_time_does_not_time_out() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 1, timeout_ns=NS)]))
    talk.turn(Started([(1, 0, talk.now)]))
    talk.turn(RunFinished(1, [0], [b""]))

    assert [e for e in talk.quiet(1500 * MS) if isinstance(e, Abort)] == []


# ------------------------------------------------------------------ beats and progress


def test_beats_come_every_two_seconds_and_name_what_runs() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 2)]))
    talk.turn(Started([(1, 0, talk.now), (1, 1, talk.now), (5, 5, talk.now)]))
    talk.turn(RunFinished(1, [1], [b""]), LoadMeasured(40))

    assert talk.quiet(2 * NS) == [talk.said(Beat([(1, 0, 2000)], 40))]
    assert talk.quiet(2 * NS) == [talk.said(Beat([(1, 0, 4000)], 40))]


def test_progress_of_an_open_attempt_is_passed_on_and_of_others_dropped() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))

    assert talk.turn(ProgressMade(1, 0, b"50"), ProgressMade(1, 1, b"?")) == [
        talk.said(Progress(1, 0, b"50"))
    ]
    talk.turn(Disconnected(talk.conn))
    assert talk.turn(ProgressMade(1, 0, b"60")) == []


# ------------------------------------------------------------------ credit


def test_credit_is_twice_the_slots_until_runs_prove_short() -> None:
    talk = joined(slots=2)
    run = an_assign(1, 4)
    talk.hear(Assign([run]))

    effects = talk.turn(finished(run, ran_ns=4 * MS))  # 1 ms each

    assert effects[0].frames[1:] == [(0, Credit(150))]  # 75 ms for two slots


def test_credit_has_a_ceiling() -> None:
    talk = joined(slots=2)
    run = an_assign(1, 4)
    talk.hear(Assign([run]))

    effects = talk.turn(finished(run, ran_ns=400))

    assert effects[0].frames[1:] == [(0, Credit(CREDIT_MAX))]


def test_credit_is_bounded_by_bytes_too() -> None:
    talk = joined(slots=2)
    run = msgspec.structs.replace(an_assign(1, 2), bodies=[bytes(1 << 18)] * 2)
    talk.hear(Assign([run]))

    effects = talk.turn(finished(run, ran_ns=400))

    assert effects[0].frames[1:] == [(0, Credit(256))]  # of 256 KiB each: 64 MiB


def test_a_small_change_of_credit_is_not_announced() -> None:
    talk = joined(slots=2)
    talk.hear(Assign([an_assign(1, 100)]))
    talk.turn(RunFinished(1, [0], [b""], ran_ns=1 * MS))

    effects = talk.turn(RunFinished(1, [1], [b""], ran_ns=2 * MS))

    assert effects[0].frames[1:] == []
    assert talk.machine.credit == 133


def test_long_runs_bring_the_credit_down_again() -> None:
    talk = joined(slots=2)
    talk.hear(Assign([an_assign(1, 100)]))
    talk.turn(RunFinished(1, [0], [b""], ran_ns=1 * MS))

    effects = talk.turn(RunFinished(1, [1], [b""], ran_ns=60 * NS))

    assert effects[0].frames[1:] == [(0, Credit(4))]


def test_a_fixed_prefetch_is_the_credit_whatever_runs_take() -> None:
    talk = joined(prefetch=2)
    talk.hear(Assign([an_assign(1, 2)]))

    effects = talk.turn(RunFinished(1, [0], [b""], ran_ns=1))

    assert effects[0].frames[1:] == []
    assert talk.machine.credit == 2


def test_what_waits_behind_long_runs_is_given_back() -> None:
    talk = joined(slots=2)
    talk.hear(Assign([an_assign(1, 3)]))
    talk.turn(RunFinished(1, [0], [b""], ran_ns=1000))
    talk.hear(Assign([an_assign(2, 10)]))
    talk.turn(Started([(1, 1, talk.now), (1, 2, talk.now)]))

    effects = talk.quiet(STALL_NS)

    assert [e for e in effects if isinstance(e, Abort)] == [
        an_abort(2, list(range(2, 10)), "recall")
    ]
    assert effects[0].frames == [(0, Credit(4))]
    assert talk.turn(Dropped(2, list(range(2, 10)))) == [
        talk.said((2, Ack([AckRun(2, [], [], {}, [], list(range(2, 10)))])))
    ]


# ------------------------------------------------------------------ leaving


def test_a_drained_worker_gives_back_what_has_not_begun_and_leaves_when_all_is_confirmed() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1, 3)]))

    assert talk.turn(Drain("stopped")) == [
        talk.said(Credit(0)),
        an_abort(1, [0, 1, 2], "recall"),
    ]
    assert talk.turn(Dropped(1, [1, 2])) == [
        talk.said((1, Ack([AckRun(1, [], [], {}, [], [1, 2])])))
    ]
    assert talk.turn(RunFinished(1, [0], [b"x"])) == [talk.said((2, Ack([AckRun(1, [0], [b"x"])])))]
    assert talk.hear(Acked(2)) == [
        talk.said(Bye("stopped")),
        Close(talk.conn, "stopped"),
        Exit("stopped"),
    ]
    assert talk.machine.next_deadline() is None


def test_a_worker_that_drains_takes_nothing_more() -> None:
    talk = joined()
    talk.hear(Assign([an_assign(1)]))
    talk.turn(Drain("stopped"))

    effects = talk.hear(Assign([an_assign(2, 2)]))

    assert effects == [talk.said((1, Ack([AckRun(2, [], [], {}, [], [0, 1])])))]


def test_an_idle_worker_without_a_broker_leaves_at_once() -> None:
    talk = Conversation()
    talk.turn()

    assert talk.turn(Drain("stopped")) == [Exit("stopped")]


def test_a_draining_worker_reconnects_to_deliver_its_outcomes() -> None:
    talk = joined()
    run = an_assign(1)
    talk.hear(Assign([run]))
    talk.turn(Drain("stopped"))
    talk.turn(Disconnected(talk.conn))
    talk.turn(finished(run))
    talk.quiet(NS)

    effects = talk.connect(expect_dial=False)

    ack = Ack([AckRun(1, None, [b"g1o0"])])
    assert effects == [talk.said(a_join([(1, [0])], credit=0), (2, ack), Beat())]
    assert talk.hear(Acked(2))[-1] == Exit("stopped")


def test_a_refusal_after_the_welcome_is_logged() -> None:
    talk = joined()

    effects = talk.turn_with_logs(talk.frames(Refusal("not_allowed", "no", "")))

    assert effects == [Log("warning", "worker.refused", {"code": "not_allowed", "text": "no"})]


# ------------------------------------------------------------------ caches


def test_offered_caches_are_for_the_world_and_its_word_goes_to_the_broker() -> None:
    talk = joined()
    talk.hear(Beat())
    use = CacheUse("d1", "0" * 64, 100)

    assert talk.hear(CacheOffer([use], True)) == [CachesOffered([use], True, False)]
    assert talk.hear(CacheOffer([use], False, True)) == [CachesOffered([use], False, True)]
    effects = talk.turn(
        CacheSaid("d1", use.manifest, "fetching", "", 5, 10), CacheSaid("d1", use.manifest, "ok")
    )

    assert effects == [
        talk.said(
            CacheAck("d1", use.manifest, "fetching", "", 5, 10), CacheAck("d1", use.manifest, "ok")
        )
    ]


def test_what_is_said_of_a_cache_while_nobody_listens_is_not_kept() -> None:
    talk = joined()
    talk.hear(Beat())
    talk.turn(Disconnected(talk.conn, "reset"))

    assert talk.turn(CacheSaid("d1", "0" * 64, "ok")) == []
    talk.now = talk.machine.next_deadline() or 0
    assert talk.connect() == [talk.said(a_join(), Beat())]


def test_an_outcome_says_which_blobs_it_refers_to_and_again_after_a_break() -> None:
    talk = joined()
    talk.hear(Beat())
    run = an_assign(1, 2)
    talk.hear(Assign([run]))
    blobs = {1: [("0" * 64, 9)]}

    effects = talk.turn(finished(run, blobs=blobs))

    ack = AckRun(1, None, run.bodies, {}, [], [], blobs)
    assert effects == [talk.said((1, Ack([ack])))]
    talk.turn(Disconnected(talk.conn, "reset"))
    talk.now = talk.machine.next_deadline() or 0
    (said,) = talk.connect()
    assert [message for _, message in said.frames if isinstance(message, Ack)] == [Ack([ack])]


def test_blobs_of_an_attempt_that_nobody_waits_for_are_not_told() -> None:
    talk = joined()
    talk.hear(Beat())
    run = an_assign(1, 2)
    talk.hear(Assign([run]))
    talk.hear(Stop(1, [0], "stale"))

    effects = talk.turn(finished(run, blobs={0: [("0" * 64, 9)], 1: [("1" * 64, 8)]}))

    ack = AckRun(1, [1], run.bodies[1:], {}, [], [], {1: [("1" * 64, 8)]})
    assert effects == [talk.said((1, Ack([ack])))]
