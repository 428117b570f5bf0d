// The kinds of things that kernels, the runtime and Python tell each other. cpu/abi.py reads the enums of this file.
#pragma once

namespace simt {

enum Mode : unsigned { PLAIN, OBSERVE, CHECK };
enum Space : unsigned char { GLOBAL, SHARED, OTHER };
enum Access : unsigned char { READ, WRITE, ATOMIC, BARRIER, SHUFFLE, MMA };
enum Collective : unsigned {  // what threads wait for each other in
    SHFL_IDX, SHFL_UP, SHFL_DOWN, SHFL_XOR, VOTE_BALLOT, VOTE_ANY, VOTE_ALL, VOTE_UNI, MATCH_ANY, MATCH_ALL,
    REDUCE, SYNCWARP, SYNCTHREADS, SYNCGRID, NUMBERED,
    PHASE,  // of a barrier that the kernel has made itself
    EXCHANGE,  // of values in a group
    PRODUCT, MATRIX,  // of matrices, and a matrix's load or store: by a whole warp
    MBARRIER,  // as PHASE, by PTX
};
struct Votes { unsigned no, yes; };  // lanes

// How a tile lies in a tensor (PTX: tensormap). The first dimension has neighbours; sizes and boxes count elements.
struct TensorMap {
    unsigned long long address, stride[4];  // in bytes, of the dimensions from the second on
    unsigned last_dim, type, size[5], box[5], element_stride[5];
    unsigned char swizzle, interleave, fill, unused;
};
// A bulk copy: of a tile at `at` of the tensor, or of `bytes` from or to `global` if the rank is 0. If it gathers, it moves
// four rows of a matrix: at[0] is the column, and the other four are the rows.
struct BulkCopy {
    TensorMap map;
    int at[5];
    unsigned rank, bytes;
    char *shared, *global;
    bool to_global, gathers;
    void (*combine)(char* to, const char* from, unsigned bytes, unsigned type);  // of a reduction: with what is there
};

// A product of matrices under way (PTX: wgmma), of one thread. Kernels make it, the runtime keeps it until it is complete.
struct Product {
    void (*compute)(Product* const* lanes);  // of the whole warp
    unsigned* out[128];  // the registers of the result
    unsigned num_out, warp;
    unsigned fragment[4];  // A, if it is in registers
    unsigned long long a, b;  // descriptors of matrices in shared memory
    bool a_in_registers, transposed_a, transposed_b, negated_a, negated_b, keeps, saturates;
    bool at_once;  // do not leave NaNs in the registers until the wait
    // of the runtime:
    bool is_chained;  // it continues from a product under way
    unsigned start[128];
    unsigned long long batch;
    void* site;
};

}  // namespace simt
