"""One example of every message, with every field away from its default."""

from __future__ import annotations

import msgspec

from ekiden.model.caches import CacheUse
from ekiden.model.jobs import Cause, Needs, Note, Route, Spec
from ekiden.wire import messages as m

NONCE = bytes(range(16))
SPEC = msgspec.Raw(
    msgspec.msgpack.encode(
        Spec(
            name="echo",
            route=Route("render.4k", Needs(500, 64, (("os", "linux"),)), key="k", pin="w1"),
            priority=-3,
            timeout_ns=1_000_000_000,
            max_attempts=5,
            retry_on=("worker_lost",),
            form=1,
            run="nightly",
        )
    )
)
NOTE = Note(exit_code=3, ran_ns=1_000_000, cpu_ns=500_000, peak_kb=2048)
CAUSE = Cause(1, "w1", "signal", "killed by 9", 1_700_000_000_000_000_000, True, NOTE)

EXAMPLES: list[m.Message] = [
    m.HelloClient(1, "ann@desk", "s1", NONCE, "ekiden/0.1.0"),
    m.HelloWorker(1, "w1", "s2", NONCE, "ekiden/0.1.0"),
    m.Challenge(1, NONCE),
    m.Proof(b"\x01" * 32),
    m.Welcome(
        b"\x02" * 32, "alpha", "b1", 3, 2_000_000_000, 15_000_000_000, 1 << 20, "ekiden/0.1.0"
    ),
    m.Join(["render.>"], 4, 8, {"os": "linux"}, 4000, 8192, "desk", [(7, [0, 2])]),
    m.Bye("draining"),
    m.Submit(SPEC, ["j1", "j2"], bytes(16), [b"a", b"b"], 5, 6, 7),
    m.Accepted([4, 5], [m.Refused(5, 0, "conflict", "taken", "choose another id", 10)]),
    m.Results(
        [m.ResultRun(["j1"], [b"out"], "w1", 1, 2, 3, {0: 2}, {0: NOTE})],
        [m.Ended("j2", "failed", [CAUSE], "poison")],
    ),
    m.Attach(["j1"]),
    m.Attached(["j9"]),
    m.Ask("jobs", {"state": "queued", "limit": 10}),
    m.Answer({"jobs": [], "more": False}),
    m.Refusal("queue_full", "subject 'a' is full", "retry later", 1500),
    m.NotLeader("10.0.0.2:7000"),
    m.Assign([m.AssignRun(7, 0, SPEC, "ann@desk", ["j1"], [b"a"], [2])]),
    m.Ack(
        [m.AckRun(7, [0], [b"out"], {0: NOTE}, [m.Failure(1, "timeout", "after 5 s", NOTE)], [2])]
    ),
    m.Acked(12),
    m.Credit(16),
    m.Stop(7, [1], "cancel"),
    m.Beat([(7, 0, 1200)], 55),
    m.Progress(7, 0, b"40%"),
    m.JobProgress("j1", 2, b"40%"),
    m.Subscribe(1, "news.*"),
    m.Unsubscribe(1),
    m.Publish("news.today", b"hi"),
    m.Delivery(1, "news.today", b"hi"),
    m.Peek(7, 1, 4096, 0, 65536),
    m.Peeked(True, b"so far", b"a warning"),
    m.BlobOffer("ab" * 32, 1 << 40),
    m.BlobPull("ab" * 32, 1 << 20, 256 << 10),
    m.BlobPart("ab" * 32, 1 << 20, b"part", 1 << 40),
    m.BlobStored("ab" * 32),
    m.BlobSpoiled("ab" * 32, 1 << 40),
    m.CacheOffer([CacheUse("d1", "cd" * 32, 300)], True, True),
    m.BlobWhere("ab" * 32, 1 << 40),
    m.BlobAt("ab" * 32, "/data/blobs/ab/abab"),
    m.CacheAck("d1", "cd" * 32, "failed", "its disk is full", 5, 9),
]
