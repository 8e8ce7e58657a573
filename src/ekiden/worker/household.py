"""The child processes of a worker, those who run jobs in them, and the data these share.

There is a keeper only if the worker offers something that needs one: a worker with handlers alone
starts no process.
"""

from __future__ import annotations

from functools import partial

from ekiden.worker import cached
from ekiden.worker.caches import Caches, claim_folder
from ekiden.worker.children import Children
from ekiden.worker.dispatch import Dispatch, Executor
from ekiden.worker.functions import FunctionExecutor
from ekiden.worker.gate import Gate
from ekiden.worker.launch import Limits
from ekiden.worker.offers import Offers
from ekiden.worker.programs import ProgramExecutor
from ekiden.worker.services import ServiceExecutor
from ekiden.worker.store import BrokerStore
from ekiden.world.loop import Driver


class Household:
    """Made on the agent's loop, for the machine that `driver` runs."""

    def __init__(self, offers: Offers, slots: int, driver: Driver) -> None:
        self._offers = offers
        self._slots = slots
        self._driver = driver
        self._store = BrokerStore(driver)
        self._children: Children | None = None
        claim = partial(claim_folder, offers.cache, offers.cache_bytes)
        self.caches = Caches(self._store.direct, driver.feed, claim)
        self.gate = Gate(driver.feed, self.caches)

    async def open(self, handlers: Executor) -> None:
        """Start the keeper if one is needed. From here on the gate performs; `handlers` were made
        to tell it."""
        await self.caches.start()
        if self.caches.trees:
            cached.add_folder(self.caches.trees)
        try:
            self.gate.open(await self._dispatch(handlers))
        except BaseException:
            self.close()
            raise

    async def _dispatch(self, handlers: Executor) -> Dispatch:
        offers, slots, emit = self._offers, self._slots, self.gate.heard
        if not offers:
            return Dispatch(emit, handlers)
        bounds = offers.programs.limits if offers.programs is not None else Limits()
        trees = self.caches.trees
        children = Children(
            offers.scratch_folder(),
            loop=self._driver.loop,
            slots=slots,
            limits=bounds,
            env={cached.ENV_CACHE: trees} if trees else {},
        )
        self._children = children
        await children.start()
        programs = functions = services = None
        if offers.programs is not None:
            programs = ProgramExecutor(
                offers.programs, slots, emit, children, self._store, trees=trees
            )
        if offers.functions:
            functions = FunctionExecutor(slots, emit, children, self._store)
        if offers.services:
            services = ServiceExecutor(offers.services, slots, emit, children)
        return Dispatch(
            emit,
            handlers,
            programs=programs,
            functions=functions,
            services=services,
            service_names=frozenset(service.name for service in offers.services),
        )

    def close(self) -> None:
        """End every child."""
        self.gate.close()
        self.caches.close()
        cached.drop_folder(self.caches.trees)
        self._store.close()
        if self._children is not None:
            self._children.close()
