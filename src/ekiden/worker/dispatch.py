"""Which executor performs which job: by the form of its body, and by name for services.

Each kind has slots of its own: a worker that offers programs and functions may be running as many
of either as it has slots. Mixing them is for trying things out; a worker in production offers one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ekiden.model.jobs import CANNOT_START, FORM_FUNCTION, FORM_PROGRAM, Spec
from ekiden.wire.messages import Failure
from ekiden.worker.contract import RECALL, STALE, Abort, Dropped, Gone, Look, Run, RunFinished, Seen

Emit = Callable[[Any], None]


class Executor(Protocol):
    """What performs attempts of one kind for the machine."""

    def run(self, effect: Run) -> None:
        """Begin these as soon as there are slots."""

    def abort(self, effect: Abort) -> None:
        """End these; see `Abort`."""

    def close(self) -> None:
        """Take no more work and end what runs."""


class Watchable(Executor, Protocol):
    """An executor whose attempts write somewhere."""

    def tail(self, grant: int, offset: int, stream: str, position: int, limit: int) -> bytes | None:
        """What the attempt has written since `position`; None if it does not run."""


class Dispatch:
    """Performs `Run`, `Abort` and `Look` by handing them on."""

    def __init__(
        self,
        emit: Emit,
        handlers: Executor,
        *,
        programs: Watchable | None = None,
        functions: Executor | None = None,
        services: Executor | None = None,
        service_names: frozenset[str] = frozenset(),
    ) -> None:
        self._emit = emit
        self._handlers = handlers
        self._programs = programs
        self._functions = functions
        self._services = services
        self._service_names = service_names

    def run(self, effect: Run) -> None:
        """Hand it to whoever can; what nobody can fails with the reason."""
        executor = self._executor(effect.spec)
        if executor is not None:
            executor.run(effect)
            return
        run, why = effect.run, _missing(effect.spec)
        failures = [Failure(run.first + at, CANNOT_START, why) for at in range(len(run.ids))]
        self._emit(RunFinished(run.grant, (), [], {}, failures))

    def abort(self, effect: Abort) -> None:
        """Hand it to whoever has them."""
        executor = self._executor(effect.spec) if effect.spec is not None else None
        if executor is not None:
            executor.abort(effect)
        elif effect.why == RECALL:
            self._emit(Dropped(effect.grant, effect.offsets))
        elif effect.why != STALE:
            self._emit(Gone(effect.grant, effect.offsets))

    def look(self, effect: Look) -> None:
        """Answer with what the attempt has written, if its kind writes anywhere."""
        executor = self._executor(effect.spec)
        if executor is None or executor is not self._programs:
            self._emit(Seen(effect.number, None))
            return
        programs, grant, offset = self._programs, effect.grant, effect.offset
        stdout = programs.tail(grant, offset, "stdout", effect.stdout, effect.limit)
        stderr = programs.tail(grant, offset, "stderr", effect.stderr, effect.limit)
        written = None if stdout is None or stderr is None else (stdout, stderr)
        self._emit(Seen(effect.number, written))

    def close(self) -> None:
        """Close them all."""
        for executor in (self._handlers, self._programs, self._functions, self._services):
            if executor is not None:
                executor.close()

    def _executor(self, spec: Spec) -> Executor | None:
        if spec.form == FORM_PROGRAM:
            return self._programs
        if spec.form == FORM_FUNCTION:
            return self._functions
        return self._services if spec.name in self._service_names else self._handlers


def _missing(spec: Spec) -> str:
    if spec.form == FORM_PROGRAM:
        return (
            "this worker runs no programs: start it with --exec NAME=PATH, or --allow-any-program"
        )
    return "this worker runs no functions: start it with --functions"
