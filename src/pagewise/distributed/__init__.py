"""Many GPUs: attention over a sequence that is spread over processes (lesson 10).

processes   `Processes`, which runs a function on n processes from a notebook cell
"""

from pagewise.distributed.processes import Processes

__all__ = ["Processes"]
