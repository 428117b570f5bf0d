// Cooperative groups: the thread block, the grid, and parts of a warp, with names for what they do together.
//
// A part of a warp is a mask of lanes; a thread's rank is its lane's place among them. Where a GPU needs several
// shuffles for what a group does at once (a reduction, a scan, a value of more than 8 bytes) the lanes meet once, and
// one shuffle is counted. A group's sync orders the memory of its own threads alone.
#pragma once

#include "simt.h"
#include "cuda_bf16.h"  // as NVIDIA's header does

namespace cooperative_groups {

namespace impl {
template <class T>
struct Exchange {
    T value;
    unsigned source;  // whose value this lane wants
    SIMT_UNSEEN static void carry_out(void** lanes) {
        Exchange* brought[32];
        T values[32];
        for (int lane = 0; lane < 32; ++lane)
            if ((brought[lane] = (Exchange*)lanes[lane])) values[lane] = brought[lane]->value;
        for (Exchange* mine : brought)
            if (mine && lanes[mine->source]) mine->value = values[mine->source];
    }
};
template <class T>
SIMT_INLINE T shuffle(simt::Collective function, unsigned mask, const T& value, unsigned source, int line) {
    if constexpr (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8) {
        return simt::shuffle(function, mask, value, (int)source);
    } else {
        Exchange<T> mine{value, source};
        simt_meet(simt::EXCHANGE, mask, &mine, Exchange<T>::carry_out, line);
        return mine.value;
    }
}

template <class T>
using plain = std::remove_cv_t<std::remove_reference_t<T>>;

SIMT_INLINE unsigned linear(uint3 at, uint3 size) { return (at.z * size.y + at.y) * size.x + at.x; }
SIMT_INLINE unsigned block_size() { return blockDim.x * blockDim.y * blockDim.z; }
SIMT_INLINE unsigned block_rank() { return linear(threadIdx, blockDim); }
SIMT_INLINE unsigned lanes_of_warp() {  // the last warp may have fewer than 32
    unsigned left = block_size() - block_rank() / 32 * 32;
    return left < 32 ? (1u << left) - 1 : ~0u;
}
}  // namespace impl

class thread_group {
protected:
    unsigned mask;  // of lanes; 0: the whole thread block
    __forceinline__ explicit thread_group(unsigned mask) : mask(mask) {}
    friend thread_group tiled_partition(const thread_group& parent, unsigned size);

public:
    __forceinline__ unsigned get_mask() const { return mask; }
    __forceinline__ unsigned long long size() const { return mask ? __popc(mask) : impl::block_size(); }
    __forceinline__ unsigned long long num_threads() const { return size(); }
    __forceinline__ unsigned long long thread_rank() const {
        return mask ? __popc(mask & ((1u << simt_lane()) - 1)) : impl::block_rank();
    }
    __forceinline__ void sync(int line = __builtin_LINE()) const {
        if (mask) __syncwarp(mask);
        else __syncthreads(line);
    }
};

template <unsigned MaxBlockSize = 1024>
struct block_tile_memory {};  // a GPU needs some for tiles of several warps

class thread_block : public thread_group {
    __forceinline__ thread_block() : thread_group(0) {}
    friend thread_block this_thread_block();

public:
    static __forceinline__ void sync(int line = __builtin_LINE()) { __syncthreads(line); }
    static __forceinline__ unsigned size() { return impl::block_size(); }
    static __forceinline__ unsigned num_threads() { return impl::block_size(); }
    static __forceinline__ unsigned thread_rank() { return impl::block_rank(); }
    static __forceinline__ dim3 group_index() { return blockIdx; }
    static __forceinline__ dim3 thread_index() { return threadIdx; }
    static __forceinline__ dim3 group_dim() { return blockDim; }
    static __forceinline__ dim3 dim_threads() { return blockDim; }
};
__forceinline__ thread_block this_thread_block() { return {}; }
template <unsigned MaxBlockSize>
__forceinline__ thread_block this_thread_block(block_tile_memory<MaxBlockSize>&) { return this_thread_block(); }

// All thread blocks of a launch, which must all be on the GPU at once (cudaLaunchCooperativeKernel).
class grid_group {
public:
    __forceinline__ bool is_valid() const { return true; }
    __forceinline__ void sync(int line = __builtin_LINE()) const { simt_grid_sync(line); }
    static __forceinline__ unsigned long long num_blocks() {
        return (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    }
    static __forceinline__ unsigned long long block_rank() { return impl::linear(blockIdx, gridDim); }
    static __forceinline__ unsigned long long num_threads() { return num_blocks() * impl::block_size(); }
    static __forceinline__ unsigned long long size() { return num_threads(); }
    static __forceinline__ unsigned long long thread_rank() {
        return block_rank() * impl::block_size() + impl::block_rank();
    }
    static __forceinline__ dim3 dim_blocks() { return gridDim; }
    static __forceinline__ dim3 group_dim() { return gridDim; }
    static __forceinline__ dim3 block_index() { return blockIdx; }
    static __forceinline__ dim3 dim_threads() {
        return {gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z};
    }
    static __forceinline__ dim3 thread_index() {
        return {blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
                blockIdx.z * blockDim.z + threadIdx.z};
    }
};
__forceinline__ grid_group this_grid() { return {}; }

namespace impl {
class lanes : public thread_group {
    unsigned meta_rank, meta_size;
    __forceinline__ unsigned lane_at(unsigned rank) const {
        unsigned left = mask;
        while (rank--) left &= left - 1;
        return (unsigned)__ffs(left) - 1;
    }
    __forceinline__ unsigned by_rank(unsigned set) const {  // the lanes of `set` that are here, as ranks
        unsigned ranks = 0, rank = 0;
        for (unsigned left = mask; left; left &= left - 1, ++rank) ranks |= (set >> (__ffs(left) - 1) & 1) << rank;
        return ranks;
    }

protected:
    __forceinline__ lanes(unsigned mask, unsigned meta_rank, unsigned meta_size)
        : thread_group(mask), meta_rank(meta_rank), meta_size(meta_size) {}

public:
    __forceinline__ unsigned size() const { return __popc(mask); }
    __forceinline__ unsigned num_threads() const { return size(); }
    __forceinline__ unsigned thread_rank() const { return __popc(mask & ((1u << simt_lane()) - 1)); }
    __forceinline__ unsigned meta_group_rank() const { return meta_rank; }
    __forceinline__ unsigned meta_group_size() const { return meta_size; }
    __forceinline__ void sync() const { __syncwarp(mask); }

    template <class T>
    __forceinline__ plain<T> shfl(T&& value, int rank, int line = __builtin_LINE()) const {
        return impl::shuffle<plain<T>>(simt::SHFL_IDX, mask, value, lane_at((unsigned)rank % size()), line);
    }
    template <class T>
    __forceinline__ plain<T> shfl_up(T&& value, unsigned delta, int line = __builtin_LINE()) const {
        unsigned rank = thread_rank();
        return impl::shuffle<plain<T>>(simt::SHFL_UP, mask, value, lane_at(rank < delta ? rank : rank - delta), line);
    }
    template <class T>
    __forceinline__ plain<T> shfl_down(T&& value, unsigned delta, int line = __builtin_LINE()) const {
        unsigned rank = thread_rank();
        unsigned source = lane_at(rank + delta < size() ? rank + delta : rank);
        return impl::shuffle<plain<T>>(simt::SHFL_DOWN, mask, value, source, line);
    }
    __forceinline__ int any(int predicate) const { return __any_sync(mask, predicate); }
    __forceinline__ int all(int predicate) const { return __all_sync(mask, predicate); }
    __forceinline__ unsigned ballot(int predicate) const { return by_rank(__ballot_sync(mask, predicate)); }
    template <class T>
    __forceinline__ unsigned match_any(T value) const { return by_rank(__match_any_sync(mask, value)); }
    template <class T>
    __forceinline__ unsigned match_all(T value, int& all) const { return by_rank(__match_all_sync(mask, value, &all)); }
};
}  // namespace impl

class coalesced_group : public impl::lanes {
    __forceinline__ explicit coalesced_group(unsigned mask, unsigned meta_rank = 0, unsigned meta_size = 1)
        : lanes(mask, meta_rank, meta_size) {}
    friend coalesced_group coalesced_threads();
    friend coalesced_group tiled_partition(const coalesced_group& parent, unsigned size);
    template <class Parent, class Label>
    friend coalesced_group labeled_partition(const Parent& parent, Label label);
    template <class Parent>
    friend coalesced_group binary_partition(const Parent& parent, bool label);
};
__forceinline__ coalesced_group coalesced_threads() { return coalesced_group(__activemask()); }

template <unsigned Size, class Parent = void>
class thread_block_tile;

template <unsigned Size>
class thread_block_tile<Size, void> : public impl::lanes {
    static_assert(Size && Size <= 32 && (Size & (Size - 1)) == 0,
                  "a tile has 1, 2, 4, 8, 16 or 32 threads: the CPU runner has none of several warps");

protected:
    static __forceinline__ unsigned mask_of_tile() {
        return (unsigned)((1ull << Size) - 1) << simt_lane() / Size * Size & impl::lanes_of_warp();
    }
    __forceinline__ thread_block_tile(unsigned meta_rank, unsigned meta_size)
        : lanes(mask_of_tile(), meta_rank, meta_size) {}

public:
    static __forceinline__ constexpr unsigned size() { return Size; }
    static __forceinline__ constexpr unsigned num_threads() { return Size; }
    static __forceinline__ unsigned thread_rank() { return simt_lane() % Size; }
    template <class T>
    __forceinline__ impl::plain<T> shfl_xor(T&& value, unsigned mask_of_ranks, int line = __builtin_LINE()) const {
        return impl::shuffle<impl::plain<T>>(simt::SHFL_XOR, mask, value, simt_lane() ^ mask_of_ranks, line);
    }
};

template <unsigned Size, class Parent>
class thread_block_tile : public thread_block_tile<Size, void> {
public:
    __forceinline__ explicit thread_block_tile(const Parent& parent)
        : thread_block_tile<Size, void>(parent.thread_rank() / Size, (parent.size() + Size - 1) / Size) {}
};

template <unsigned Size, class Parent>
__forceinline__ thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
    static_assert(!std::is_base_of<coalesced_group, Parent>::value,
                  "a coalesced group is divided by tiled_partition(group, size)");
    return thread_block_tile<Size, Parent>(parent);
}
__forceinline__ thread_block_tile<1> this_thread() { return thread_block_tile<1, thread_block>(this_thread_block()); }

// Groups of `size` threads that follow each other by rank.
__forceinline__ thread_group tiled_partition(const thread_group& parent, unsigned size) {
    unsigned rank = (unsigned)parent.thread_rank(), part = 0, at = 0;
    if (size == 0 || size > 32 || size & (size - 1))
        simt_refuse(simt_lane(), "divides a group into tiles of a size that is not 1, 2, 4, 8, 16 or 32");
    for (unsigned left = parent.mask ? parent.mask : impl::lanes_of_warp(); left; left &= left - 1, ++at)
        if (at / size == rank % 32 / size) part |= left & -left;
    return thread_group(part);
}
__forceinline__ coalesced_group tiled_partition(const coalesced_group& parent, unsigned size) {
    unsigned part = tiled_partition((const thread_group&)parent, size).get_mask();
    return coalesced_group(part, parent.thread_rank() / size, (parent.size() + size - 1) / size);
}

// Those of the group that bring the same label.
template <class Parent, class Label>
__forceinline__ coalesced_group labeled_partition(const Parent& parent, Label label) {
    unsigned same = __match_any_sync(parent.get_mask(), label), leader = same & -same;
    unsigned leaders = __ballot_sync(parent.get_mask(), leader == 1u << simt_lane());
    return coalesced_group(same, __popc(leaders & (leader - 1)), __popc(leaders));
}
template <class Parent>
__forceinline__ coalesced_group binary_partition(const Parent& parent, bool label) {
    unsigned yes = __ballot_sync(parent.get_mask(), label), all = parent.get_mask();
    return coalesced_group(label ? yes : all & ~yes, label, 2);
}

template <class Group>
__forceinline__ void sync(const Group& group, int line = __builtin_LINE()) {
    if constexpr (std::is_base_of<impl::lanes, Group>::value) group.sync();
    else group.sync(line);
}
template <class Group>
__forceinline__ auto thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group>
__forceinline__ auto group_size(const Group& group) { return group.size(); }

template <class Group, class Function, class... Args>
__forceinline__ void invoke_one(const Group& group, Function&& function, Args&&... args) {
    if (group.thread_rank() == 0) std::forward<Function>(function)(std::forward<Args>(args)...);
}
template <class Group, class Function, class... Args>
__forceinline__ auto invoke_one_broadcast(const Group& group, Function&& function, Args&&... args) {
    impl::plain<decltype(function(args...))> result{};
    if (group.thread_rank() == 0) result = std::forward<Function>(function)(std::forward<Args>(args)...);
    return group.shfl(result, 0);
}

}  // namespace cooperative_groups
