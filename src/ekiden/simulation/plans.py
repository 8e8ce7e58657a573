"""What the jobs of a simulated world are and how their runs behave.

A plan is fixed by the seed before anything happens, so what a run does depends on the job and the
attempt alone, never on when or where it runs. The output of every run is unique: from a result one
can tell which run of which attempt brought it.
"""

from __future__ import annotations

from random import Random

import msgspec

from ekiden.client.contract import Terms
from ekiden.limits import NS
from ekiden.model.jobs import CANNOT_START, HANDLER_ERROR, TIMEOUT, Needs, Route, Spec
from ekiden.simulation.world import MS

SUBJECTS = ("render.4k", "render.hd", "price.fx", "mail")
_encode = msgspec.msgpack.Encoder().encode


class Behaviour(msgspec.Struct, frozen=True):
    """What one attempt does: ends well (`cause` empty), fails, or takes its worker down."""

    duration_ns: int
    cause: str = ""
    kills: bool = False


class JobPlan(msgspec.Struct):
    """One job of the workload."""

    id: str
    client: str
    body: bytes
    terms: Terms
    spec: Spec
    attempts: list[Behaviour]
    """By attempt; the last one goes for all that follow."""
    output_bytes: int = 0
    """The least size of its results: some are too large to stay in the broker's memory."""

    def behaviour(self, attempt: int) -> Behaviour:
        """What that attempt does."""
        return self.attempts[min(attempt, len(self.attempts)) - 1]


def make_jobs(dice: Random, client: str, first: int, count: int, wall: int) -> list[JobPlan]:
    """A batch of jobs that one client submits together under the same terms."""
    spec = _make_spec(dice)
    delay, not_before, expires_at = 0, 0, 0
    match dice.randrange(12):
        case 0:
            delay = dice.randrange(1, 5) * NS // 2
        case 1:
            not_before = wall + dice.randrange(1, 6) * NS
        case 2:
            expires_at = wall + dice.randrange(1, 12) * NS
    terms = Terms(_encode(spec), delay, not_before, expires_at)
    return [
        JobPlan(
            id=f"{client}-{first + at}",
            client=client,
            body=b"%d " % (first + at) + dice.randbytes(dice.choice((4, 40, 40, 700))),
            terms=terms,
            spec=spec,
            attempts=_make_attempts(dice, spec),
            output_bytes=dice.choice((0, 0, 0, 0, 0, 0, 0, 2000)),
        )
        for at in range(count)
    ]


def _make_spec(dice: Random) -> Spec:
    needs = Needs()
    match dice.randrange(8):
        case 0:
            needs = Needs(labels=(("gpu", "yes"),))
        case 1:
            needs = Needs(cpu_milli=1000, mem_mb=100)
    return Spec(
        name="work",
        route=Route(
            subject=dice.choice(SUBJECTS),
            needs=needs,
            key=f"key{dice.randrange(3)}" if dice.random() < 0.1 else "",
        ),
        priority=dice.choice((0, 0, 0, 0, 5, -3)),
        timeout_ns=dice.choice((0, 0, 0, 3 * NS)),
        max_attempts=dice.choice((0, 0, 0, 1, 2, 5)),
        retry_on=dice.choice((None, None, None, (HANDLER_ERROR, TIMEOUT, "worker_lost"))),
        run=dice.choice(("", "night", "day")),
    )


def _make_attempts(dice: Random, spec: Spec) -> list[Behaviour]:
    def well() -> Behaviour:
        return Behaviour(_duration(dice))

    def badly() -> Behaviour:
        return Behaviour(_duration(dice), cause=dice.choice((HANDLER_ERROR, CANNOT_START)))

    roll = dice.random()
    if roll < 0.74:
        return [well()]
    if roll < 0.86:
        return [*(badly() for _ in range(dice.randint(1, 3))), well()]
    if roll < 0.92:
        return [badly()]
    if roll < 0.945:
        return [Behaviour(_duration(dice), kills=True), well()]
    if roll < 0.95:
        return [Behaviour(_duration(dice), kills=True)]
    if spec.timeout_ns:
        return [Behaviour(spec.timeout_ns + 2 * NS), well()]
    return [Behaviour(dice.randrange(3, 12) * NS) if dice.random() < 0.5 else well()]


def _duration(dice: Random) -> int:
    """Most runs are short; some take a while, so that cancels and pauses meet them."""
    return dice.choice((0, 1, 5, 20, 20, 100, 400, 1500)) * MS + dice.randrange(MS)
