"""A warm service in Python: answers every line with what it was sent, and counts.

Start it under a worker:

    ekiden worker --service warm-echo="python3 examples/services/echo_service.py"

and send it a job:

    ekiden submit --wait warm-echo --payload '{"x": 2}'
"""

import json
import sys


def main() -> None:
    # Whatever is slow to start belongs here: curves, licences, models.
    answered = 0
    print(json.dumps({"ekiden": "ready"}), flush=True)

    for line in sys.stdin:
        job = json.loads(line)
        if isinstance(job, dict) and "fail" in job:
            answer = {"ekiden": "error", "message": job["fail"]}
        else:
            answered += 1
            answer = {"echo": job, "answered": answered}
        print(json.dumps(answer), flush=True)


main()
