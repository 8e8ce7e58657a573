"""The async client, over sockets, against the least broker there can be."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.unit.client.loopback import KEY, Loopback

import ekiden
from ekiden import errors
from ekiden.wire.messages import Ended


def hold(_job_id, _body):
    """Accept, and do not answer."""
    return


@asynccontextmanager
async def pair(answer=None, **options):
    with Loopback(*([answer] if answer else [])) as broker:
        async with ekiden.AsyncClient(broker.address, key=KEY, client_id="me", **options) as client:
            yield broker, client


def run(scene):
    """Run a scene to its end, within bounds."""

    async def bounded():
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(bounded())


def test_a_job_is_awaited():
    async def scene():
        async with pair() as (_, client):
            future = client.submit("echo", payload=b"hello")
            with pytest.raises(asyncio.InvalidStateError):
                future.result()

            result = await future

            assert result.output == b"hello"
            assert await future is not None
            assert future.result().output == b"hello"
            assert future.exception() is None

    run(scene)


def test_many_jobs_are_gathered():
    async def scene():
        async with pair() as (_, client):
            futures = await client.submit_many("echo", [b"%d" % n for n in range(3000)])
            results = await asyncio.gather(*futures)
            assert [result.output for result in results] == [b"%d" % n for n in range(3000)]

    run(scene)


@pytest.mark.parametrize("in_order", [True, False])
def test_map_brings_everything(in_order):
    async def scene():
        async with pair() as (_, client):
            source = map(str, range(2000))
            results = client.map("echo", source, in_order=in_order, window=100)
            outputs = [int(result.output) async for result in results]
            assert (outputs if in_order else sorted(outputs)) == list(range(2000))

    run(scene)


def test_map_raises_or_returns_what_failed():
    def answer(job_id, body):
        return Ended(job_id, "failed") if body == b"1" else body

    async def scene():
        async with pair(answer) as (_, client):
            both = [each async for each in client.map("echo", [b"0", b"1"], return_errors=True)]
            assert [type(each).__name__ for each in both] == ["JobResult", "JobFailed"]
            with pytest.raises(errors.JobFailed):
                _ = [each async for each in client.map("echo", [b"0", b"1"])]

    run(scene)


def test_acceptance_and_cancel_are_awaited():
    async def scene():
        async with pair(hold) as (_, client):
            future = client.submit("echo", job_id="j1")
            await future.wait_accepted(10)
            assert future.accepted and not future.done()

            assert await future.cancel() is True

            with pytest.raises(errors.JobCancelled):
                await future
            assert await future.cancel() is True

    run(scene)


def test_giving_up_the_wait_leaves_the_job_be():
    async def scene():
        async with pair(hold) as (broker, client):
            future = client.submit("echo", job_id="j1")
            await future.wait_accepted(10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(future, 0.01)

            await asyncio.to_thread(broker.do, lambda machine: machine.settle("j1", b"later"))

            assert (await future).output == b"later"

    run(scene)


def test_past_the_bound_submit_refuses_and_the_others_wait():
    async def scene():
        with Loopback() as broker:
            broker.machine.mute = True
            client = ekiden.AsyncClient(broker.address, key=KEY, pending_max=10)
            async with client:
                await client.wait_connected(10)
                first = [client.submit("echo") for _ in range(10)]
                with pytest.raises(errors.QueueFull, match="ready_to_submit"):
                    client.submit("echo")
                rest = asyncio.ensure_future(client.submit_many("echo", [b""] * 50))
                ready = asyncio.ensure_future(client.ready_to_submit())
                await asyncio.sleep(0)
                assert not rest.done() and not ready.done()

                await asyncio.to_thread(broker.do, lambda m: setattr(m, "mute", False))
                await asyncio.to_thread(broker.do, lambda m: m.hang_up())

                await ready
                await asyncio.gather(*first, *(await rest))

    run(scene)


def test_questions_and_refusals():
    async def scene():
        async with pair() as (_, client):
            assert await client.stats() == {"verb": "stats"}
            assert await client.job("j1") == {"verb": "job", "id": "j1"}
            assert await client.jobs() == {"verb": "jobs"}
            assert await client.workers() == []
            assert (await client.cancel("j1"))["cancelled"] == 0
            with pytest.raises(errors.BadRequest):
                await client.ask("nonsense")
            with pytest.raises(errors.UnknownJob):
                await client.attach("nobody")

    run(scene)


def test_publish_and_subscribe():
    async def scene():
        async with pair() as (_, client):
            async with client.subscribe("news") as subscription:
                await subscription.wait_active()
                await client.publish("news", b"1")
                await client.publish("news", b"2")
                assert [(await subscription.take()).payload for _ in range(2)] == [b"1", b"2"]
            assert [message async for message in subscription] == []

    run(scene)


def test_nothing_reachable_and_a_wrong_key_are_told_apart():
    async def scene():
        with Loopback() as broker:
            async with ekiden.AsyncClient(broker.address, key=b"x" * 32) as client:
                with pytest.raises(errors.Unauthenticated):
                    await client.wait_connected(10)
        async with ekiden.AsyncClient(broker.address, key=KEY, ask_timeout_s=0.1) as client:
            with pytest.raises(errors.Unreachable):
                await client.wait_connected(0.1)
            with pytest.raises(errors.Unreachable):
                await client.stats()

    run(scene)


def test_a_client_that_was_not_entered_says_how():
    client = ekiden.AsyncClient("127.0.0.1:1", key=KEY)

    with pytest.raises(errors.WrongUsage, match="async with"):
        client.submit("echo")


def test_closing_hands_over_what_was_submitted_and_ends_the_rest():
    async def scene():
        async with pair(hold) as (broker, client):
            futures = [client.submit("echo", job_id=f"j{n}") for n in range(100)]
            await client.close()
            await client.close()

            assert broker.machine.submitted == [f"j{n}" for n in range(100)]
            with pytest.raises(errors.Closed):
                await futures[0]
            with pytest.raises(errors.Closed):
                client.submit("echo")

    run(scene)
