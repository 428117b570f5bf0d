"""Waits for other threads and processes."""

import time


def soon(condition, seconds: float = 10.0, *, every: float = 0.005) -> bool:
    """Whether the condition comes true in time. It is asked `every` so many seconds."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(every)
    return true


def has_ended(pid: int) -> bool:
    """Whether a process is gone. A process that its parent has not waited for yet counts as gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
