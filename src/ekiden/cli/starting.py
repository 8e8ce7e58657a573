"""From what was typed to a run that is followed."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ekiden.cli import inputs, joblog, jobs, output
from ekiden.cli import manifest as manifests
from ekiden.cli.feeding import Submitting
from ekiden.cli.following import Follower, Wishes
from ekiden.cli.manifest import FORMAT, Manifest
from ekiden.cli.offered import Offers, Runnable, resolve, warn_if_nobody
from ekiden.client.options import make_terms
from ekiden.client.programs import program_terms
from ekiden.errors import Conflict, WrongUsage
from ekiden.model.jobs import FORM_PROGRAM

if TYPE_CHECKING:
    from ekiden.client.blocking import Client


class Order(Struct, frozen=True, kw_only=True):
    """What the user wants to be run."""

    line: inputs.Line
    common: dict[str, Path]
    name: str
    log: Path | None
    resume: bool
    shipping: bool
    any_program: bool | None
    options: dict[str, Any]


def read_rows(line: inputs.Line) -> list[inputs.Row]:
    """The inputs; stdin has them only if it is no person."""
    if not line.sources and sys.stdin.isatty():
        raise WrongUsage(
            "no inputs", remedy="put them after ':::', as in: ekiden run ./price.sh ::: *.json"
        )
    return inputs.read_rows(line.sources)


def print_lines(order: Order, rows: list[inputs.Row], *, as_json: bool) -> int:
    """What would be run, without asking anybody."""
    runnable = resolve(order.line.program, Offers([]), wish=None, shipping=order.shipping)
    manifest = _manifest(order, runnable, rows)
    template = manifest.template
    for number, entry in enumerate(manifest.entries, 1):
        argv = [runnable.command, *template.expand(entry.words, number)]
        if as_json:
            files = {each: inputs.printable(path) for each, path in entry.files.items()}
            words = {"input": entry.inputs, "argv": argv}
            told = {name: list(map(inputs.printable, each)) for name, each in words.items()}
            output.emit({"number": number, **told, "files": files})
        else:
            print(joblog.command_text(argv))
    return output.DONE


class Start:
    """From an order to a run that is followed."""

    def __init__(self, client: Client, order: Order, wishes: Wishes) -> None:
        self._client = client
        self._order = order
        self._wishes = wishes

    def follow(self, rows: list[inputs.Row]) -> int:
        """Submit what is to be submitted and follow it; the exit code."""
        order, client = self._order, self._client
        offers = Offers(client.workers())
        runnable = resolve(
            order.line.program, offers, wish=order.any_program, shipping=order.shipping
        )
        manifest = _manifest(order, runnable, rows)
        name = order.name or _new_name(runnable.name)
        wishes = _checked_wishes(order, runnable, name)
        done = self._done(manifest)
        numbers = [n for n in range(1, len(rows) + 1) if n not in done]
        if not numbers:
            output.say(f"nothing to run: by {order.log} all inputs are done")
            return output.DONE
        wishes["manifest"] = self._reference(name, manifest, numbers if done else [])
        log = joblog.JobLog(order.log, keep=order.resume) if order.log else None
        if not self._wishes.quiet and not self._wishes.as_json:
            self._announce(name, len(numbers), len(done), runnable)
        warn_if_nobody(runnable, offers)
        gate = Submitting(
            client, name, manifest.entries, manifest.template, runnable.command, wishes
        )
        return Follower(
            client, name, manifest, gate, numbers, self._wishes, joblog=log, skipped=len(done)
        ).follow()

    def _done(self, manifest: Manifest) -> set[int]:
        """Inputs that the log calls done."""
        if not (self._order.resume and self._order.log):
            return set()
        ended: Counter[str] = joblog.read_done(self._order.log)
        template = manifest.template
        found: set[int] = set()
        for number, entry in enumerate(manifest.entries, 1):
            argv = [manifest.command, *template.expand(entry.inputs, number)]
            text = joblog.command_text(argv)
            if ended[text] > 0:
                ended[text] -= 1
                found.add(number)
        return found

    def _reference(self, name: str, manifest: Manifest, numbers: list[int]) -> str:
        """What the jobs are to call their manifest by. If there is a run of this name it must be
        this one; what failed of it runs again if it is resumed."""
        found = manifests.find(self._client, name) if self._order.name else ""
        if not found:
            partial = msgspec.structs.replace(manifest, numbers=numbers)
            return manifests.put(self._client, partial)
        if not manifests.is_same(manifests.read(self._client, name, found), manifest):
            raise Conflict(
                f"run {name!r} is there already, with another program, arguments or inputs",
                remedy=f"choose another --name; see: ekiden runs show {name}",
            )
        for state in ("failed", "cancelled") if self._order.resume else ():
            jobs.change(self._client, "replay", None, {"run": name, "state": state})
        return found

    def _announce(self, name: str, count: int, skipped: int, runnable: Runnable) -> None:
        less = f", {skipped:,} more were done before" if skipped else ""
        output.say(f"run {name}: {output.count(count, 'input')}{less}")
        for word in self._order.line.args:
            if runnable.any_program and _stays(word) and Path(word).name not in self._order.common:
                output.say(
                    f"  {word!r} names a file here that stays here; to send it: --with {word}"
                )


def _manifest(order: Order, runnable: Runnable, rows: list[inputs.Row]) -> Manifest:
    taken = [*order.common, *runnable.files]
    entries = inputs.make_entries(rows, shipping=order.shipping, taken=taken)
    return Manifest(FORMAT, runnable.command, order.line.args, list(entries))


def _checked_wishes(order: Order, runnable: Runnable, name: str) -> dict[str, Any]:
    """What is said of all jobs; whatever is wrong with it is told before any is sent."""
    wishes: dict[str, Any] = {
        **order.options,
        "run": name,
        "any_program": runnable.any_program,
        "common": {**order.common, **runnable.files} or None,
    }
    terms = program_terms(runnable.command, {**wishes})  # type: ignore[typeddict-item]
    make_terms(terms.name, FORM_PROGRAM, terms.options)
    return wishes


def _stays(word: str) -> bool:
    return not word.startswith(("-", "/")) and "{" not in word and Path(word).is_file()


def _new_name(program: str) -> str:
    """Nobody else's."""
    now = datetime.now().astimezone().strftime("%m%d-%H%M%S")
    return f"{program[:40].strip('.-') or 'run'}-{now}-{secrets.token_hex(2)}"
