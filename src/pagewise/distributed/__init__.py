"""Many GPUs: attention over a sequence that is spread over processes (lesson 10).

processes   `Processes`, which runs a function on n processes from a notebook cell
tensor_parallel   `tensor_parallel`, which gives each process some heads and columns of every layer of a model
"""

from pagewise.distributed.processes import Processes
from pagewise.distributed.tensor_parallel import tensor_parallel

__all__ = ["Processes", "tensor_parallel"]
