"""Many GPUs: attention over a sequence that is spread over the processes of a group (lesson 10).

sequence, ring, all_to_all and decode share the tokens of a sequence, and counted has formulas of what they send. In
tensor_parallel, processes share the layers of a model. All transfers are in communication. The processes are those of
torchrun, of `Processes` in a notebook, or of a team, which serves lesson 9's engine.
"""

from pagewise.distributed.all_to_all import all_to_all_attention
from pagewise.distributed.communication import count_bytes
from pagewise.distributed.decode import decode_attention, merge_over_processes
from pagewise.distributed.processes import Processes
from pagewise.distributed.ring import ring_attention
from pagewise.distributed.sequence import pieces, shard_sequence, unshard_sequence
from pagewise.distributed.tensor_parallel import tensor_parallel
