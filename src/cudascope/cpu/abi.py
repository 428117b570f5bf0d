"""The data that Python and the runtime exchange: runtime/kinds.h and runtime/launch.h, name by name, field by field."""

import ctypes
import functools
from enum import IntEnum

import numpy as np

from cudascope.cpu import build

# ------------------------------------------------------------------------------------------------ kinds

Mode = IntEnum("Mode", "PLAIN OBSERVE CHECK", start=0)
Space = IntEnum("Space", "GLOBAL SHARED OTHER", start=0)
Access = IntEnum("Access", "READ WRITE ATOMIC BARRIER SHUFFLE MMA", start=0)
Collective = IntEnum(
    "Collective",
    "SHFL VOTE MATCH REDUCE SYNCWARP SYNCTHREADS SYNCGRID NUMBERED PHASE EXCHANGE PRODUCT MATRIX",
    start=0,
)
SPACES, ACCESSES = ([kind.name.lower() for kind in kinds] for kinds in (Space, Access))

# ------------------------------------------------------------------------------------------------ structures


def _structure(name: str, *fields: tuple) -> type:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


u8, u16, u32, u64, i32, i64, pointer = (
    ctypes.c_uint8,
    ctypes.c_uint16,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_void_p,
)
DIM = _structure("Dim", ("x", u32), ("y", u32), ("z", u32))
REGION = _structure(
    "_Region",
    ("start", u64),
    ("bytes", u64),
    ("granule", u32),
    ("expect_written", u32),
    ("constant", u32),
    ("in_place", u32),
    ("written", pointer),
)
SHARED_ARRAY = _structure("SharedArray", ("offset", i64), ("bytes", u64))
WAITER = _structure(
    "Waiter",
    ("site", u64),
    *((name, u32) for name in ("collective", "mask", "count", "running", "line")),
    ("thread", DIM),
)
ERROR = _structure(
    "_Error",
    *((name, u32) for name in ("finding", "access", "space", "bytes")),
    *((name, DIM) for name in ("block", "thread", "other_block", "other_thread")),
    ("site", u64),
    ("other_site", u64),
    ("address", u64),
    ("region", i32),
    ("other_access", u32),
    ("offset", i64),
    ("lane", u32),
    ("num_waiters", u32),
    ("waiters", WAITER * 8),
    ("text", ctypes.c_char * 256),
    ("count", u64),
)
COUNT = _structure(
    "_Count",
    ("site", u64),
    ("access", u32),
    ("space", u32),
    *((name, u64) for name in ("requests", "lanes", "bytes", "sectors", "conflicts", "wavefronts")),
)
EVENT = np.dtype(
    [
        ("site", "u8"),
        ("order", "u8"),
        ("offset", "i8"),
        ("block", "u4"),
        ("execution", "u4"),
        ("region", "i4"),
        ("thread", "u2"),
        ("bytes", "u1"),
        ("access", "u1"),
        ("space", "u1"),
        ("pad", "u1", 7),
    ]
)
LAUNCH = _structure(
    "_Launch",
    ("entry", pointer),
    ("arguments", ctypes.POINTER(pointer)),
    ("grid", u32 * 3),
    ("block", u32 * 3),
    *((name, u32) for name in ("mode", "workers", "shuffled", "keep_going")),
    *((name, u64) for name in ("seed", "time_limit", "ignored")),
    ("regions", ctypes.POINTER(REGION)),
    ("shared", ctypes.POINTER(SHARED_ARRAY)),
    ("guards", ctypes.POINTER(SHARED_ARRAY)),
    ("variables", ctypes.POINTER(SHARED_ARRAY)),
    ("shared_segment", u64),
    ("dynamic_offset", i64),
    ("dynamic_bytes", u64),
    *((name, u32) for name in ("num_regions", "num_shared", "num_guards", "num_variables", "num_pointers")),
    ("pointers", ctypes.POINTER(u32)),
    ("pointer_regions", ctypes.POINTER(u32)),
    ("max_events", u64),
    ("max_blocks", u32),
    ("may_return", u32),
    ("num_errors", u32),
    ("errors", ctypes.POINTER(ERROR)),
    ("counts", ctypes.POINTER(COUNT)),
    ("num_counts", u64),
    ("events", pointer),
    ("num_events", u64),
    ("output", pointer),
    ("num_output", u64),
    ("executed", ctypes.POINTER(u64)),
    *((name, u64) for name in ("num_executed", "sectors_read", "sectors_read_first", "sectors_written")),
)


@functools.cache
def runtime() -> ctypes.PyDLL:
    """The compiled runtime, once it is known to lay out its structures as this file does."""
    library = build.runtime()
    library.simt_sizeof_launch.restype = ctypes.c_uint64
    assert library.simt_sizeof_launch() == ctypes.sizeof(LAUNCH)
    return library
