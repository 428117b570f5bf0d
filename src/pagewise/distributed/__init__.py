"""Many GPUs: attention over a sequence that is spread over the processes of a group (lesson 10).

processes       `Processes`, which runs a function on n processes from a notebook cell
communication   every transfer between processes, and the count of its bytes
sequence        shares of a sequence, contiguous and zigzag
ring            `ring_attention`: keys and values travel from process to process
all_to_all      `all_to_all_attention`: processes exchange heads for tokens
decode          `decode_attention` and `merge_over_processes`: results travel
counted         bytes of each method and pairs of each process, as formulas
tensor_parallel each process computes some heads and columns of every layer of a model
team            the groups of the processes of one engine, and the messages between them
"""

from pagewise.distributed.all_to_all import all_to_all_attention
from pagewise.distributed.communication import count_bytes
from pagewise.distributed.decode import decode_attention, merge_over_processes
from pagewise.distributed.processes import Processes
from pagewise.distributed.ring import ring_attention
from pagewise.distributed.sequence import pieces, shard_sequence, unshard_sequence
from pagewise.distributed.tensor_parallel import tensor_parallel
