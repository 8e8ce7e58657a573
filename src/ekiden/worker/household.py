"""The child processes of a worker and those who run jobs in them.

There is a keeper, and a way to the broker's store, only if the worker offers something that needs
them: one with handlers alone starts no process.
"""

from __future__ import annotations

from ekiden.worker.children import Children
from ekiden.worker.dispatch import Dispatch, Executor
from ekiden.worker.functions import FunctionExecutor
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

    async def open(self, handlers: Executor) -> Dispatch:
        """Start the keeper if one is needed, and say who performs what."""
        offers, slots, emit = self._offers, self._slots, self._driver.feed
        if not offers:
            return Dispatch(emit, handlers)
        bounds = offers.programs.limits if offers.programs is not None else Limits()
        children = Children(
            offers.scratch_folder(), loop=self._driver.loop, slots=slots, limits=bounds
        )
        self._children = children
        await children.start()
        programs = functions = services = None
        if offers.programs is not None:
            programs = ProgramExecutor(offers.programs, slots, emit, children, self._store)
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
        self._store.close()
        if self._children is not None:
            self._children.close()
