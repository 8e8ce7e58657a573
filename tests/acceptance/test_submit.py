"""Sending jobs and waiting for them."""

from __future__ import annotations

import signal

from tests.acceptance import schemas as s
from tests.acceptance.cli import WAIT_S, Cli, until


def test_submit_and_wait_prints_the_output_and_nothing_else(grid: Cli) -> None:
    outcome = grid.run("submit", "--wait", "echo", "--payload", "hello, grid")

    assert (outcome.code, outcome.out, outcome.err) == (0, b"hello, grid", "")


def test_a_payload_goes_through_unchanged_from_stdin_and_from_a_file(grid: Cli) -> None:
    data = bytes(range(256)) * 100
    file = grid.folder / "input.bin"
    file.write_bytes(data)

    assert grid.run("submit", "--wait", "echo", "--payload", "-", stdin=data).out == data
    assert grid.run("submit", "--wait", "echo", "--payload", f"@{file}").out == data


def test_words_after_the_double_dash_are_the_jobs_arguments(grid: Cli) -> None:
    outcome = grid.run("submit", "--wait", "sleep", "--", "0.01")

    assert outcome.out == b"slept 0.01 s"


def test_a_job_can_be_waited_for_by_its_id_from_another_process(grid: Cli) -> None:
    job_id = grid.run("submit", "sha256", "--payload", "abc").out.decode().strip()
    outcome = grid.run("wait", job_id)

    assert outcome.code == 0
    assert outcome.out.startswith(b"ba7816bf")
    assert grid.json("jobs", "show", job_id)["state"] == "done"


def test_a_result_as_json_says_who_ran_it_and_when(grid: Cli) -> None:
    result = grid.typed(s.Done, "submit", "--wait", "echo", "--payload", "x", "--id", "timed")

    assert (result.id, result.output, result.attempt, result.exit_code) == ("timed", "x", 1, 0)
    assert result.submitted <= result.leased <= result.finished
    assert result.worker


def test_an_output_that_is_no_text_is_tagged_in_json(grid: Cli) -> None:
    words = ("submit", "--wait", "echo", "--payload", "-")

    assert grid.typed(s.Done, *words, stdin=b"\xff").output == {"base64": "/w=="}


def test_many_jobs_of_one_command_have_numbered_ids_and_ordered_outputs(grid: Cli) -> None:
    ids = grid.run("submit", "echo", "--id", "many", "--count", "3", "--payload", "m").out.split()
    outcome = grid.run("wait", "many-3", "many-1", "many-2")

    assert ids == [b"many-1", b"many-2", b"many-3"]
    assert (outcome.code, outcome.out) == (0, b"m\nm\nm\n")


def test_the_same_id_is_the_same_job_and_other_content_is_refused(grid: Cli) -> None:
    for _ in range(2):
        outcome = grid.run("submit", "--wait", "echo", "--id", "same", "--payload", "one")
        assert (outcome.code, outcome.out) == (0, b"one")
    words = ("submit", "--wait", "echo", "--id", "same", "--payload", "two")

    assert grid.refused(*words) == "conflict"


def test_waiting_ends_when_asked_to_and_the_job_goes_on(grid: Cli) -> None:
    grid.run("submit", "echo", "--id", "later", "--delay", "3600")

    assert grid.refused("wait", "later", "--timeout", "0.1", code=3) == "timeout"
    assert grid.json("jobs", "show", "later")["state"] == "delayed"
    assert grid.json("jobs", "cancel", "later")["cancelled"] == 1


def test_one_job_per_line_and_the_outputs_in_the_order_of_the_lines(grid: Cli) -> None:
    file = grid.folder / "lines.txt"
    file.write_bytes(b"first\nsecond\r\n\nlast without an end")

    outcome = grid.run("submit", "--wait", "echo", "--lines", str(file), "--id", "line")

    assert (outcome.code, outcome.out) == (0, b"first\nsecond\n\nlast without an end\n")
    assert grid.run("wait", "line-2").out == b"second"


def test_ids_can_be_piped_from_submit_to_wait(grid: Cli) -> None:
    numbers = b"".join(b"%d\n" % number for number in range(3000))

    ids = grid.run("submit", "echo", "--lines", "-", stdin=numbers).out
    outcome = grid.run("wait", "-", stdin=ids)

    assert (outcome.code, outcome.out) == (0, numbers)


def test_a_line_that_is_too_long_is_named_and_the_others_are_sent(grid: Cli) -> None:
    text = b"short\n" + bytes([120]) * (600 << 10) + b"\nalso short\n"

    outcome = grid.run("submit", "--wait", "echo", "--lines", "-", stdin=text)

    assert (outcome.code, outcome.out) == (4, b"short\nalso short\n")
    assert "line 2: " in outcome.err


def test_every_option_of_submit_reaches_the_job(grid: Cli) -> None:
    words = ["submit", "echo", "--id", "opted", "--subject", "job.assign.nobody.here"]
    words += ["--priority", "3", "--timeout", "5", "--max-attempts", "2", "--retry-on", "timeout"]
    words += ["--needs", "cpu=1,mem_mb=1,label.gpu=a100", "--key", "k", "--worker", "w9"]
    words += ["--run", "night", "--client-id", "ci", "--not-before", "2020-01-01T00:00"]
    words += ["--expires-at", "2099-12-31T23:59+09:00"]
    grid.typed(s.Accepted, *words)
    job = grid.typed(s.Shown, "jobs", "show", "opted")

    assert (job.state, job.subject, job.priority) == ("queued", "job.assign.nobody.here", 3)
    assert (job.run, job.client) == ("night", "ci")
    assert "no connected worker" in job.why


def test_a_job_that_has_not_begun_when_it_expires_is_cancelled(grid: Cli) -> None:
    words = ("submit", "--wait", "nobody", "--id", "stale", "--expires-at", "2020-01-01T00:00")

    assert grid.typed(s.NotDone, *words, code=1).error.code == "job_cancelled"


def test_an_attempt_over_its_time_limit_is_ended(grid: Cli) -> None:
    words = ("submit", "--wait", "sleep", "--payload", "3600", "--timeout", "0.2")
    outcome = grid.typed(s.NotDone, *words, code=1)

    assert [cause.cause for cause in outcome.error.causes] == ["timeout"]


def test_a_higher_priority_goes_first(own: Cli) -> None:
    own.start_up("--slots", "1")
    (worker,) = own.typed(s.Workers, "workers", "list").workers
    own.run("workers", "drain", worker.id)
    for priority in ("-1", "0", "9"):
        own.run("submit", "echo", "--id", f"p{priority}", "--priority", priority)
    own.run("workers", "resume", worker.id)
    own.run("wait", "p-1", "p0", "p9")

    told = own.json_lines("log", "dump", str(own.data), "--event", "assign")
    assert [line["job"] for line in told] == ["p9", "p0", "p-1"]


def test_ctrl_c_while_waiting_leaves_the_job_alone(grid: Cli) -> None:
    grid.run("submit", "echo", "--id", "left", "--delay", "3600")
    waiting = grid.start("wait", "left")
    until(lambda: grid.look("stats")["clients"] == 2, "the waiting client to connect")
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=WAIT_S)

    assert (waiting.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert grid.typed(s.Shown, "jobs", "show", "left").state == "delayed"
