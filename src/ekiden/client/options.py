"""From what a user says about a job to what travels: terms and a body.

Terms are made once per distinct set of options: a caller that submits a million alike jobs pays for
one lookup per job. Whatever can be seen to be wrong without asking the broker is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypedDict

import msgspec

from ekiden import limits
from ekiden.client.contract import Publishing, Terms
from ekiden.core.subjects import check_subject
from ekiden.errors import BadId, TooLarge, WrongUsage
from ekiden.limits import NS
from ekiden.model.caches import BlobRef, check_cache_id
from ekiden.model.ids import check_name, check_party, shown
from ekiden.model.jobs import CAUSES, FORM_CALL, FORM_PLAIN, FORM_PROGRAM, Call, Needs, Route, Spec

# Distinct option sets remembered; a caller with a new deadline for every job must not fill memory.
_TERMS_KEPT: Final = 10_000

_encode = msgspec.msgpack.Encoder().encode


# What encoders raise for values that have no place on the wire.
_UNSENDABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)


class JobOptions(TypedDict, total=False):
    """How a job is to be run, beside its name and payload. All may be left out.

    `subject`: where it waits [job.assign.<name>] · `priority`: -9 to 9, higher first ·
    `delay_s`: start no sooner than this · `not_before`, `expires_at`: wall time as an aware
    datetime or seconds since 1970 · `timeout_s`: limit of one attempt · `max_attempts` ·
    `retry_on`: causes worth another attempt · `needs`: {"cpu": 2, "mem_mb": 4000,
    "label": {"gpu": "a100"}} · `key`: jobs of one key go to one worker · `run`: a name to find
    jobs by · `pin`: only this worker · `caches`: ids of data that must lie on the worker before
    the job begins, each a folder `$EKIDEN_CACHE/<id>` there.
    """

    subject: str | None
    priority: int
    delay_s: float
    not_before: datetime | float | None
    expires_at: datetime | float | None
    timeout_s: float | None
    max_attempts: int | None
    retry_on: Iterable[str] | None
    needs: Mapping[str, Any] | None
    key: str | None
    run: str | None
    pin: str | None
    caches: Iterable[str] | None


_KNOWN: Final = frozenset(JobOptions.__annotations__)


class TermsBook:
    """Terms by the options they were made from."""

    def __init__(self) -> None:
        self._known: dict[Any, Terms] = {}
        # Most calls are like the one before. Only options that cannot change later are kept here.
        self._last: tuple[str, int, JobOptions, bytes, Terms | None] = ("", 0, {}, b"", None)

    def terms(
        self,
        name: str,
        form: int,
        options: JobOptions,
        shared: bytes = b"",
        blobs: Iterable[BlobRef] = (),
    ) -> Terms:
        """The terms for jobs called `name`. `blobs` are those of the store that `shared` refers to.
        Raises `WrongUsage` or `BadId`."""
        last_name, last_form, last_options, last_shared, last = self._last
        if (
            last is not None
            and last_name == name
            and last_form == form
            and last_options == options
            and last_shared == shared
        ):
            return last
        key: Any = (name, form, shared, *options.items())
        try:
            found = self._known.get(key)
            fixed = True
        except TypeError:
            key = (name, form, shared, repr(options))
            found = self._known.get(key)
            fixed = False
        if found is None:
            found = make_terms(name, form, options, shared, blobs)
            if len(self._known) >= _TERMS_KEPT:
                self._known.clear()
            self._known[key] = found
        if fixed:
            self._last = (name, form, options, shared, found)
        return found


def make_terms(
    name: str,
    form: int,
    options: JobOptions,
    shared: bytes = b"",
    blobs: Iterable[BlobRef] = (),
) -> Terms:
    """What jobs with these options share on the wire."""
    if strange := sorted(set(options) - _KNOWN):
        raise WrongUsage(f"no such option: {', '.join(strange)}", remedy="see ekiden.JobOptions")
    check_name(name, "job name")
    caches = _caches(options.get("caches"))
    spec = Spec(
        name=name,
        route=Route(
            subject=check_subject(options.get("subject") or f"job.assign.{name}"),
            needs=make_needs(options.get("needs")),
            key=_named(options.get("key"), "key"),
            pin=check_party(pin, "worker") if (pin := options.get("pin")) else "",
            data=caches,
        ),
        priority=_whole(
            options.get("priority") or 0, "priority", -limits.PRIORITY_MAX, limits.PRIORITY_MAX
        ),
        timeout_ns=_duration(options.get("timeout_s"), "timeout_s"),
        max_attempts=_whole(
            options.get("max_attempts") or 0, "max_attempts", 0, limits.MAX_ATTEMPTS_BOUND
        ),
        retry_on=_causes(options.get("retry_on")),
        form=form,
        run=_named(options.get("run"), "run"),
        shared=shared,
        blobs=tuple(sorted(set(blobs))),
    )
    return Terms(
        _encode(spec),
        _duration(options.get("delay_s"), "delay_s"),
        _wall_time(options.get("not_before"), "not_before"),
        _wall_time(options.get("expires_at"), "expires_at"),
        caches,
        form == FORM_PROGRAM,
    )


def make_needs(wish: Mapping[str, Any] | None) -> Needs:
    """`{"cpu": 2, "mem_mb": 4000, "label": {"gpu": "a100"}}`; a label may be "name=value" too."""
    if not wish:
        return Needs()
    if strange := sorted(set(wish) - {"cpu", "mem_mb", "label", "labels"}):
        raise WrongUsage(
            f"no such need: {', '.join(map(str, strange))}", remedy="needs has cpu, mem_mb, label"
        )
    labels = _labels(wish.get("label")) | _labels(wish.get("labels"))
    if len(labels) > limits.LABELS_MAX:
        raise WrongUsage(f"more than {limits.LABELS_MAX} labels are needed", remedy="need fewer")
    cpu = _number(wish.get("cpu", 0), "needs cpu")
    return Needs(
        cpu_milli=round(cpu * 1000),
        mem_mb=_whole(wish.get("mem_mb", 0), "needs mem_mb", 0, 1 << 40),
        labels=tuple(sorted(labels.items())),
    )


def _labels(wish: Any) -> dict[str, str]:
    if wish is None:
        return {}
    if isinstance(wish, Mapping):
        found = {str(name): str(value) for name, value in wish.items()}
    else:
        pairs = [wish] if isinstance(wish, str) else list(wish)
        found = {}
        for pair in pairs:
            name, equals, value = str(pair).partition("=")
            if not equals or not name:
                raise WrongUsage(f"label {pair!r} is not usable", remedy="write name=value")
            found[name] = value
    return {_named(name, "label"): _named(found[name], "label value") for name in found}


def to_bytes(payload: Any) -> bytes:
    """bytes as they are, text as UTF-8, anything else as JSON."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    try:
        return payload.encode() if isinstance(payload, str) else msgspec.json.encode(payload)
    except _UNSENDABLE as error:
        raise WrongUsage(
            f"a payload of type {type(payload).__name__} cannot be sent: {error}",
            remedy="give bytes, text or what JSON can hold",
        ) from None


def make_body(payload: Any, args: Iterable[Any]) -> tuple[int, bytes]:
    """The form and the body of a job. Raises `TooLarge` or `WrongUsage`."""
    body = to_bytes(payload)
    form = FORM_PLAIN
    given = list(args)
    if given:
        form = FORM_CALL
        try:
            body = _encode(Call(body, given))
        except _UNSENDABLE as error:
            raise WrongUsage(
                f"the args cannot be sent: {error}", remedy="give numbers, text, bytes, lists, maps"
            ) from None
    if len(body) > limits.PAYLOAD_BYTES_MAX:
        raise too_large(len(body))
    return form, body


def check_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a question, if they can be sent."""
    try:
        _encode(params)
    except _UNSENDABLE as error:
        raise WrongUsage(
            f"the parameters cannot be sent: {error}", remedy="give numbers, text, lists and maps"
        ) from None
    return params


def make_message(subject: str, payload: Any) -> Publishing:
    """Something to publish. Raises `BadSubject`, `TooLarge` or `WrongUsage`."""
    body = to_bytes(payload)
    if len(body) > limits.PAYLOAD_BYTES_MAX:
        raise too_large(len(body))
    return Publishing(check_subject(subject), body)


def too_large(size: int) -> TooLarge:
    """The payload is over the limit."""
    return TooLarge(
        f"a payload of {size:,} bytes is over the limit of {limits.PAYLOAD_BYTES_MAX:,}",
        remedy="split the job, or pass a reference to the data",
    )


# ------------------------------------------------------------------ one value at a time


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise WrongUsage(f"{what} is {value!r}", remedy="give a number that is not negative")
    return value


def _whole(value: Any, what: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise WrongUsage(f"{what} is {value!r}", remedy=f"give a whole number, {least} to {most}")
    return value


def _duration(value: float | None, what: str) -> int:
    if value is None:
        return 0
    seconds = _number(value, what)
    if seconds * NS >= 1 << 62:
        raise WrongUsage(f"{what} is {value!r}", remedy="give less than a hundred years")
    return round(seconds * NS)


def _wall_time(value: datetime | float | None, what: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, datetime):
        return _duration(value, what)
    wall_ns = round(value.timestamp() * 1_000_000) * 1000
    if not 0 <= wall_ns < 1 << 62:
        raise WrongUsage(f"{what} is {value}", remedy="give a time between 1970 and 2116")
    return wall_ns


def _causes(wish: Iterable[str] | None) -> tuple[str, ...] | None:
    if wish is None:
        return None
    causes = (wish,) if isinstance(wish, str) else tuple(wish)
    for cause in causes:
        if cause not in CAUSES:
            raise WrongUsage(
                f"no such cause: {cause!r}", remedy=f"retry_on takes of: {', '.join(CAUSES)}"
            )
    return causes


def _caches(wish: Iterable[str] | None) -> tuple[str, ...]:
    if wish is None:
        return ()
    given = (wish,) if isinstance(wish, str) else wish
    caches = tuple(sorted({check_cache_id(cache) for cache in given}))
    if len(caches) > limits.CACHES_PER_JOB:
        raise WrongUsage(
            f"{len(caches)} caches for one job", remedy=f"use at most {limits.CACHES_PER_JOB}"
        )
    return caches


def _named(text: str | None, what: str) -> str:
    if not text:
        return ""
    if len(text) > limits.NAME_LENGTH_MAX or not text.isprintable():
        raise BadId(f"{what} {shown(text)} is not usable", remedy="use up to 128 printable letters")
    return text
