"""`make demo`: a grid of real processes, from its first job to a broker that is killed and returns.

Everything lives in a temporary folder, on a free port of this machine, and is gone afterwards. The
exit code is 0 only if every result was right and every process ended as it should.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

DEALS: Final = 120
DIGESTS: Final = 20_000
SURVIVORS: Final = 5_000
START_WAIT_S: Final = 30.0
RESULT_WAIT_S: Final = 60.0
STOP_WAIT_S: Final = 30.0
LOG_LINES: Final = 15

# Paths of the simulation are few, so that the demo is quick: the error is some percent of the spot.
TOLERANCE: Final = 0.05

HANDLERS: Final = '''\
import hashlib, math, random
import ekiden

worker = ekiden.Worker()

@worker.handler("job.assign.price")
def price(job):
    """A call option by simulation: what is it worth today?"""
    deal = job.json()
    spot, strike, vol, years = (deal[name] for name in ("spot", "strike", "vol", "years"))
    if strike <= 0:
        raise ValueError(f"a strike of {strike} makes no sense")
    draw = random.Random(job.id).gauss
    paths = [spot * math.exp(-vol * vol * years / 2 + vol * math.sqrt(years) * draw(0, 1))
             for _ in range(4000)]
    return {"price": sum(max(path - strike, 0) for path in paths) / len(paths)}

@worker.handler("job.assign.sha256")
def sha256(job):
    return hashlib.sha256(job.payload).hexdigest()
'''


BOOKS: Final = 8
SCRIPT: Final = """\
#!/bin/sh
# The value of a book of deals: the sum of its second column, also as a file.
awk -F, '{ sum += $2 } END { print sum }' "$1" | tee value.txt
"""


class DemoFailed(Exception):
    """Something did not go as it must."""


class Grid:
    """A broker and a worker as processes of their own, and a folder for them."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.folder = folder
        (folder / "prices.py").write_text(HANDLERS)
        (folder / "value.sh").write_text(SCRIPT)
        (folder / "value.sh").chmod(0o755)
        for number in range(1, BOOKS + 1):
            lines = "".join(f"deal{n},{n * number}\n" for n in range(100))
            (folder / f"book{number}.csv").write_text(lines)
        # Python in this process speaks to the same grid as the commands.
        os.environ |= {
            "EKIDEN_STATE": str(folder / "state"),
            "EKIDEN_CONNECT": f"127.0.0.1:{self.port}",
            "PYTHONUNBUFFERED": "1",
        }
        os.environ.pop("EKIDEN_KEY_FILE", None)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, command: str, *, ends_with: int = 0) -> None:
        """Show a command line, run it, and look at how it ends."""
        _command(command)
        code = subprocess.call(_argv(command), cwd=self.folder, stderr=subprocess.STDOUT)
        if code != ends_with:
            raise DemoFailed(f"{command!r} ended with {code} instead of {ends_with}")

    def start(self, role: str, command: str) -> None:
        """Show a command line and start it in the background."""
        _command(f"{command} &")
        with (self.folder / f"{role}.log").open("ab") as log:
            self.running[role] = subprocess.Popen(
                _argv(command), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def start_broker(self) -> None:
        """Start the broker on its data folder, the first time or again."""
        self.start("broker", f"ekiden broker --port {self.port} --data data")

    def stop(self) -> None:
        """End worker and broker as a person would, the worker first."""
        for role in ("worker", "broker"):
            process = self.running.pop(role)
            _command(f"kill {process.pid}      # the {role}")
            process.terminate()
            code = process.wait(STOP_WAIT_S)
            if code != 0:
                raise DemoFailed(f"the {role} ended with {code}")
            print(f"the {role} has ended in good order")

    def end(self) -> None:
        """Whatever happened, nothing is left running."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def print_logs(self) -> None:
        """What broker and worker said last."""
        for log in sorted(self.folder.glob("*.log")):
            print(f"\nlast lines of the {log.stem}:")
            for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
                print(f"  {line}")


def main() -> int:
    """Run the demo; 0 if every job had its result."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ekiden-demo-")))
        grid = Grid(folder)
        stack.callback(grid.end)
        try:
            _show(grid)
        except KeyboardInterrupt:
            print("\ndemo: interrupted")
            return 130
        except Exception as error:  # noqa: BLE001 - whatever it is, say it and fail
            print(f"\ndemo: FAILED: {type(error).__name__}: {error}", flush=True)
            grid.print_logs()
            return 1
    spent_s = time.monotonic() - began
    print(f"\ndemo: all is well, in {spent_s:.0f} s. Go on with README.md, or with: ekiden up")
    return 0


def _show(grid: Grid) -> None:
    _headline("A grid on this machine: a broker, and a worker with these handlers")
    print("\n".join(f"    {line}" for line in HANDLERS.splitlines()[2:]))
    grid.start_broker()
    offers = "--handlers prices.py --allow-any-program --functions"
    grid.start("worker", f"ekiden worker --slots 2 {offers}")
    _wait_for_worker()

    _headline("A job from the command line")
    deal = '{"spot": 100, "strike": 105, "vol": 0.2, "years": 1}'
    grid.run(f"ekiden submit --wait price --payload {shlex.quote(deal)}")
    print(flush=True)

    _headline(f"{DEALS} deals from Python, checked against the formula")
    _price()

    _headline(f"{DIGESTS:,} small jobs, each on disk before it is accepted, every result checked")
    _digest()

    _headline("A program of yours over your files: both travel, what it writes comes back")
    print("\n".join(f"    {line}" for line in SCRIPT.splitlines()))
    _run_script(grid)

    _headline("A Python function, as with a ProcessPoolExecutor")
    _call()

    _headline("A job that cannot work: tried again, then a dead letter with its causes")
    bad = '{"spot": 100, "strike": -1, "vol": 0.2, "years": 1}'
    words = f"--id bad --max-attempts 2 --payload {shlex.quote(bad)}"
    grid.run(f"ekiden submit --wait price {words}", ends_with=1)
    grid.run("ekiden dlq list")

    _headline(f"kill -9 of the broker while {SURVIVORS:,} jobs are open")
    _kill_and_return(grid)

    _headline("How the grid is doing")
    grid.run("ekiden stats")

    _headline("Stop, and look whether every byte of the journal is sound")
    grid.stop()
    grid.run("ekiden log verify data")


# ------------------------------------------------------------------ what is shown


def _headline(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if _in_colour() else ("", "")
    print(f"\n{bold}── {text}{plain}", flush=True)


def _command(text: str) -> None:
    green, plain = ("\x1b[32m", "\x1b[0m") if _in_colour() else ("", "")
    print(f"{green}${plain} {text}", flush=True)


def _in_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _argv(command: str) -> list[str]:
    _, *words = shlex.split(command)
    return [sys.executable, "-m", "ekiden.cli.main", *words]


# ------------------------------------------------------------------ what is run


def _wait_for_worker() -> None:
    import ekiden

    deadline = time.monotonic() + START_WAIT_S
    # The key appears with the broker, so until then there is nothing to connect with.
    while True:
        try:
            with ekiden.Client() as client:
                client.wait_connected(1.0)
                if client.stats()["workers"]["connected"]:
                    return
        except ekiden.errors.EkidenError:
            pass
        if time.monotonic() > deadline:
            raise DemoFailed("broker and worker did not find each other")
        time.sleep(0.05)


def _price() -> None:
    import ekiden

    print(">>> with ekiden.Client() as client:")
    print('...     results = list(client.map("price", deals))')
    deals = [
        {"spot": 100.0, "strike": 80.0 + number % 41, "vol": 0.1 + number % 5 / 10, "years": 1.0}
        for number in range(DEALS)
    ]
    with ekiden.Client() as client:
        prices = [result.json()["price"] for result in client.map("price", deals)]
    for deal, price in list(zip(deals, prices, strict=True))[:4]:
        print(
            f"strike {deal['strike']:5.0f}  vol {deal['vol']:.1f}  simulated {price:6.2f}"
            f"  by the formula {_formula(deal):6.2f}"
        )
    errors = [abs(price - _formula(deal)) for deal, price in zip(deals, prices, strict=True)]
    if max(errors) > 100 * TOLERANCE:
        raise DemoFailed(f"a price is off by {max(errors):.2f}")
    print(f"… all {DEALS} within {max(errors):.2f} of the formula")


def _formula(deal: dict[str, Any]) -> float:
    """Black and Scholes, without interest."""
    spot, strike, deviation = deal["spot"], deal["strike"], deal["vol"] * math.sqrt(deal["years"])
    d1 = math.log(spot / strike) / deviation + deviation / 2
    return float(spot * _normal(d1) - strike * _normal(d1 - deviation))


def _normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _digest() -> None:
    import ekiden

    inputs = [f"input {number}".encode() for number in range(DIGESTS)]
    begun = time.perf_counter()
    with ekiden.Client() as client:
        outputs = [result.text() for result in client.map("sha256", inputs)]
    spent = time.perf_counter() - begun
    _check(outputs, inputs)
    print(f"{DIGESTS:,} of {DIGESTS:,} digests are right, in {spent:.1f} s")


def _run_script(grid: Grid) -> None:
    books = " ".join(f"book{number}.csv" for number in range(1, BOOKS + 1))
    grid.run(f"ekiden run --quiet --keep-order --out out ./value.sh ::: {books}")
    for number in range(1, BOOKS + 1):
        saved = grid.folder / "out" / f"book{number}.csv" / "value.txt"
        if int(saved.read_text()) != number * 4950:
            raise DemoFailed(f"{saved} says {saved.read_text()!r}")
    print(f"… and out/book1.csv/value.txt to out/book{BOOKS}.csv/value.txt are right")


def _call() -> None:
    import ekiden

    print(">>> with ekiden.Executor() as pool:")
    print("...     digits = list(pool.map(lambda n: len(str(math.factorial(n))), range(1000)))")
    with ekiden.Executor() as pool:
        digits = list(pool.map(lambda n: len(str(math.factorial(n))), range(1000)))
    if digits != [len(str(math.factorial(n))) for n in range(1000)]:
        raise DemoFailed("a function came back with another value")
    print(f"999! has {digits[-1]:,} digits; all 1,000 are right")


def _check(outputs: list[str], inputs: list[bytes]) -> None:
    right = sum(
        output == hashlib.sha256(data).hexdigest()
        for output, data in zip(outputs, inputs, strict=True)
    )
    if right != len(inputs):
        raise DemoFailed(f"{right:,} of {len(inputs):,} digests are right")


def _kill_and_return(grid: Grid) -> None:
    import ekiden

    broker = grid.running.pop("broker")
    inputs = [f"survivor {number}".encode() for number in range(SURVIVORS)]
    with ekiden.Client() as client:
        futures = client.submit_many("sha256", inputs)
        futures[0].result(RESULT_WAIT_S)
        done = sum(future.done() for future in futures)
        _command(f"kill -9 {broker.pid}      # {done:,} of {SURVIVORS:,} results are here")
        broker.send_signal(signal.SIGKILL)
        broker.wait()
        grid.start_broker()
        begun = time.perf_counter()
        _check([future.result(RESULT_WAIT_S).text() for future in futures], inputs)
        spent = time.perf_counter() - begun
    print(f"{SURVIVORS:,} of {SURVIVORS:,} jobs have their result, {spent:.1f} s later:")
    print("client and worker came back by themselves, nothing was lost, nothing counted twice")


if __name__ == "__main__":
    sys.exit(main())
