// The kinds of things that kernels, the runtime and Python tell each other; simt/abi.py has the same names.
#pragma once

namespace simt {

enum Mode : unsigned { PLAIN, OBSERVE, CHECK };
enum Space : unsigned char { GLOBAL, SHARED, OTHER };
enum Access : unsigned char { READ, WRITE, ATOMIC, BARRIER, SHUFFLE, MMA };
enum Collective : unsigned {  // what threads wait for each other in
    SHFL, VOTE, MATCH, REDUCE, SYNCWARP, SYNCTHREADS, SYNCGRID, NUMBERED,
    PHASE,  // of a barrier that the kernel has made itself
    EXCHANGE,  // of values in a group
    PRODUCT, MATRIX,  // of matrices, and a matrix's load or store: by a whole warp
};
struct Votes { unsigned no, yes; };  // lanes
enum FindingKind : unsigned {
    NOTHING, DEADLOCK, OUTSIDE_GLOBAL, OUTSIDE_SHARED, MISALIGNED, RACE, BARRIER_NOT_REACHED, LANE_GONE,
    LANE_NOT_IN_MASK, UNINITIALISED_SHARED, UNINITIALISED_GLOBAL, FAILED, FAULT, SPINNING, BARRIERS_DIFFER,
    DIVIDED_BY_ZERO, STOPPED, HANGING, INTERRUPTED, STACK_OVERFLOW, OVERRUN, SAME_VALUE, LEFT_BEFORE_BARRIER,
    LANES_MISSING, ARGUMENT, COPY_IN_FLIGHT, COPY_PENDING, READ_ONLY, NOT_SUPPORTED, UNREADABLE,
    OUTSIDE_LOCAL,
};

}  // namespace simt
