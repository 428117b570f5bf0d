// The memory of a launch: where its tensors and shared arrays lie while it runs, and what an address belongs to.
#pragma once

#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>

#include "block.h"

constexpr u64 PAGE = 4096, SPACE = 64ull << 30, SMALL = 256 << 10;
constexpr u8 CANARY = 0xa5;  // round a tensor, as far as its pages go

static char* reserve(u64 bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char*)p;
}
static u64 up(u64 bytes, u64 unit) { return (bytes + unit - 1) / unit * unit; }

// ---------------------------------------------------------------------------------------------- arenas

// Memory with empty space before and behind it, as much as there is. Small ones are kept for the next launch.
struct Arena { char *start, *pages; u64 bytes, page_bytes; };
static std::vector<Arena> spare_arenas;
static std::vector<Stacks> spare_stacks;
static std::mutex spare_lock;

// `phase`: where in a page table's 2 MB the memory is to begin.
static Arena take_arena(u64 page_bytes, u64 phase = 0) {
    constexpr u64 TABLE = 2 << 20;
    if (page_bytes <= SMALL) {
        std::lock_guard<std::mutex> guard(spare_lock);
        for (size_t i = spare_arenas.size(); i--;)
            if (spare_arenas[i].page_bytes == page_bytes) {
                Arena arena = spare_arenas[i];
                spare_arenas.erase(spare_arenas.begin() + (int)i);
                return arena;
            }
    }
    for (u64 space = SPACE; space >= TABLE; space /= 4) {
        u64 bytes = 2 * space + page_bytes;
        char* start = reserve(bytes, PROT_NONE);
        if (!start) continue;
        char* pages = start + space / 2;
        pages += (phase + TABLE - (u64)pages % TABLE) % TABLE;
        mprotect(pages, page_bytes, PROT_READ | PROT_WRITE);
        return {start, pages, bytes, page_bytes};
    }
    return {};
}

static void give_back(const Shadow& s) {
    if (s.page_bytes <= SMALL && !s.spoiled) {
        std::lock_guard<std::mutex> guard(spare_lock);
        if (spare_arenas.size() < 64) {
            spare_arenas.push_back({s.arena, s.pages, s.arena_bytes, s.page_bytes});
            return;
        }
    }
    munmap(s.arena, s.arena_bytes);
}

static void place(Shadow& s, const Arena& arena) {
    s.arena = arena.start, s.arena_bytes = arena.bytes, s.pages = arena.pages, s.page_bytes = arena.page_bytes;
}

// ---------------------------------------------------------------------------------------------- a kernel's malloc

// Kernels have a heap of their own, so that no stray index of theirs meets the process's. It is empty again when all that
// was allocated has been freed.
constexpr u64 HEAP = 4ull << 30;
static char* heap = nullptr;
static std::atomic<u64> heap_used{0}, live_allocations{0};

static void* allocate(u64 bytes) {
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    if (!heap && !(heap = reserve(HEAP, PROT_READ | PROT_WRITE))) return nullptr;
    if (!live_allocations && heap_used) madvise(heap, up(heap_used, PAGE), MADV_DONTNEED), heap_used = 0;
    if (bytes > HEAP - heap_used - 32) return nullptr;
    live_allocations++;
    char* p = heap + heap_used.fetch_add(up(bytes, 16) + 16) + 16;
    ((u64*)p)[-1] = (u64)p;  // until it is freed
    return p;
}
static bool is_in_heap(const void* p) { return heap && p >= heap && p < heap + HEAP; }
// False: `p` is not what allocate() gave, or has been freed before.
static bool deallocate(void* p) {
    u64 owner = (u64)p;
    if ((u64)p % 16 || p == heap || !__atomic_compare_exchange_n((u64*)p - 1, &owner, 0, false, 5, 5)) return false;
    live_allocations--;
    return true;
}

// ---------------------------------------------------------------------------------------------- shared memory

// Of the largest possible dynamic part, what this launch has not.
static void allow_rest(const Launch& launch, const Shadow& s, int protection) {
    if (launch.dynamic_offset < 0) return;
    u64 first = up(launch.dynamic_offset + launch.dynamic_bytes, PAGE);
    u64 last = (launch.dynamic_offset + SIMT_MAX_SHARED) / PAGE * PAGE;
    if (first < last) mprotect(s.pages + first, last - first, protection);
}

static void map_shared(Job& job, Block& b) {
    const Launch& launch = job.launch;
    Shadow& s = b.shared;
    s.bytes = launch.shared_segment;
    place(s, take_arena(up(std::max<u64>(s.bytes, 1), PAGE)));
    s.start = s.pages;
    allow_rest(launch, s, PROT_NONE);
    if (launch.mode == CHECK) {
        s.cell_bytes = s.bytes * sizeof(Cell);
        s.cells = (Cell*)reserve(s.cell_bytes, PROT_READ | PROT_WRITE);
    }
}

static Stacks take_stacks(u32 threads, size_t in_flight) {
    Stacks stacks{};
    {
        std::lock_guard<std::mutex> guard(spare_lock);
        for (size_t i = 0; i < spare_stacks.size() && !stacks.start; ++i)
            if (spare_stacks[i].threads >= threads) {
                stacks = spare_stacks[i];
                spare_stacks.erase(spare_stacks.begin() + (int)i);
            }
    }
    u32 room = std::max<u32>(threads, in_flight == 1 ? MAX_THREADS : 0);
    if (!stacks.start) stacks = {reserve(STACK * room, PROT_READ | PROT_WRITE), room, 0};
    u32 guarded = in_flight * threads < 16384 ? threads : 0;  // a process has 65530 mappings at most
    for (; stacks.guarded < guarded; ++stacks.guarded) mprotect(stacks.start + stacks.guarded * STACK, GUARD, PROT_NONE);
    return stacks;
}

// The stacks of the first thread blocks are kept for the next launch.
static void release_block(const Job& job, Block& b, bool keep) {
    if (b.shared.cells) munmap(b.shared.cells, b.shared.cell_bytes);
    allow_rest(job.launch, b.shared, PROT_READ | PROT_WRITE);
    give_back(b.shared);
    std::lock_guard<std::mutex> guard(spare_lock);
    if (keep && spare_stacks.size() < 64) spare_stacks.push_back(b.stacks);
    else munmap(b.stacks.start, STACK * b.stacks.threads);
}

// ---------------------------------------------------------------------------------------------- tensors

// A launch works on its tensors elsewhere, with empty space round each, so that a stray index meets nothing. Small ones are
// copied. The pages of a large one are moved there and back; who else touches it meanwhile waits for the launch to end. One
// that nobody may write stays where it is, unless the launch is watched.
static void map_tensor(Shadow& s, bool plain) {
    char *first = (char*)up((u64)s.original, PAGE), *last = (char*)((u64)(s.original + s.bytes) / PAGE * PAGE);
    bool move = s.bytes > SMALL;
    // a copy of a plain launch ends as near to the empty space as its alignment lets it
    u64 before = (u64)s.original % (plain && !move ? 16 : PAGE), pages = up(before + s.bytes, PAGE);
    place(s, take_arena(pages, move ? (u64)s.original / PAGE * PAGE % (2 << 20) : 0));
    if (!s.arena) return;
    if (plain && !move) before = (pages - s.bytes - before) / 16 * 16 + before;
    s.start = s.pages + before;
    if (move) {
        s.moved = (u64)(last - first);
        int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
        void* to = mremap(first, s.moved, s.moved, how, s.start + (first - s.original));
        if (to == MAP_FAILED) s.moved = 0;
        else mprotect(first, s.moved, PROT_NONE);
    }
    if (!s.moved) first = last = s.original + s.bytes;
    char *head = s.start + (first - s.original), *tail = s.start + (last - s.original), *end = s.start + s.bytes;
    memset(s.pages, CANARY, (size_t)(s.start - s.pages));
    memcpy(s.start, s.original, (size_t)(head - s.start));
    memcpy(tail, last, (size_t)(end - tail));
    memset(end, CANARY, (size_t)(s.pages + pages - end));
}

static bool is_intact(const char* from, const char* to) {
    for (; from < to; ++from)
        if ((u8)*from != CANARY) return false;
    return true;
}

// Copy where that changes something. False: the memory may not be written, and a tensor that lies there neither.
static bool copy_back(char* to, const char* from, size_t bytes) {
    if (!bytes || memcmp(to, from, bytes) == 0) return true;
    iovec source{(void*)from, bytes}, target{to, bytes};
    if (process_vm_writev(getpid(), &source, 1, &target, 1, 0) == (ssize_t)bytes) return true;
    if (errno == EFAULT) return false;
    memcpy(to, from, bytes);  // the system has no such call for us
    return true;
}

// Take the results back.
static FindingKind unmap_tensor(Shadow& s) {
    char *end = s.start + s.bytes, *first = s.original + s.bytes, *last = first;
    if (s.moved) first = (char*)up((u64)s.original, PAGE), last = first + s.moved;
    char *head = s.start + (first - s.original), *tail = s.start + (last - s.original);
    if (s.moved) mremap(head, s.moved, s.moved, MREMAP_MAYMOVE | MREMAP_FIXED, first);
    FindingKind found = NOTHING;
    if (!s.constant && !copy_back(s.original, s.start, (size_t)(head - s.start))) found = READ_ONLY;
    if (!s.constant && !copy_back(last, tail, (size_t)(end - tail))) found = READ_ONLY;
    if (!is_intact(s.pages, s.start) || !is_intact(end, s.pages + s.page_bytes)) found = OVERRUN;
    give_back(s);
    return found;
}

// Launches that share a tensor, and one of which may write it, take turns.
struct InUse { const Job* job; char *start, *end; bool shared; };
static std::vector<InUse> in_use;
static std::mutex use_lock;
static std::condition_variable use_ended;

static void map_tensors(Job& job) {
    Launch& launch = job.launch;
    bool plain = launch.mode == PLAIN;
    job.tensors = std::vector<Shadow>(launch.num_regions);
    for (u32 i = 0; i < launch.num_regions; ++i) {
        const Region& region = launch.regions[i];
        Shadow& s = job.tensors[i];
        s.start = s.original = (char*)region.start;
        s.bytes = region.bytes, s.granule = region.granule, s.constant = region.constant;
        if (launch.mode == CHECK) {
            s.cell_bytes = (region.bytes / region.granule + 1) * sizeof(Cell);
            s.cells = (Cell*)reserve(s.cell_bytes, PROT_READ | PROT_WRITE);
        }
    }
    auto conflicts = [&](const InUse& use) {
        for (const Shadow& s : job.tensors)
            if (s.original < use.end && use.start < s.original + s.bytes && !(plain && s.constant && use.shared)) return true;
        return false;
    };
    {
        std::unique_lock<std::mutex> guard(use_lock);
        use_ended.wait(guard, [&] { return std::none_of(in_use.begin(), in_use.end(), conflicts); });
        for (const Shadow& s : job.tensors)
            in_use.push_back({&job, s.original, s.original + s.bytes, plain && s.constant});
    }
    for (u32 i = 0; i < launch.num_regions; ++i) {
        Shadow& s = job.tensors[i];
        bool stays = launch.regions[i].in_place || (plain && s.constant && s.bytes > SMALL);
        if (!stays) map_tensor(s, plain);
    }
    for (u32 i = 0; i < launch.num_pointers; ++i) {
        const Shadow& s = job.tensors[launch.pointer_regions[i]];
        *(u64*)launch.arguments[launch.pointers[i]] += (u64)s.start - (u64)s.original;
    }
}

// What came to light about the tensors: of the first, if there is any.
static Error unmap_tensors(Job& job) {
    Error error{};
    for (u32 i = 0; i < job.tensors.size(); ++i) {
        Shadow& s = job.tensors[i];
        if (s.cells) munmap(s.cells, s.cell_bytes);
        FindingKind found = s.arena ? unmap_tensor(s) : NOTHING;
        if (found && !error.finding) error.finding = found, error.region = (int)i, error.count = 1;
    }
    std::lock_guard<std::mutex> guard(use_lock);
    in_use.erase(std::remove_if(in_use.begin(), in_use.end(), [&](const InUse& u) { return u.job == &job; }), in_use.end());
    use_ended.notify_all();
    return error;
}

// ---------------------------------------------------------------------------------------------- what an address is

struct Place { Space space; int32_t region; int64_t offset; };

static bool is_shared(const Block& b, const void* p) {
    return p >= b.shared.arena && p < b.shared.arena + b.shared.arena_bytes;
}
// Registers and local memory, of any of its threads.
static bool is_local(const Block& b, const void* p) {
    return p >= b.stacks.start && p < b.stacks.start + STACK * b.stacks.threads;
}

// __constant__ and __device__ variables lie in the compiled file.
static bool in_module(Job& job, const char* p) {
    if ((u64)p >> 12 == job.module_page) return true;
    Dl_info info;
    if (!dladdr(p, &info)) return false;
    job.module_page = (u64)p >> 12;
    return true;
}

static bool is_allocated(const Job& job, const char* p, u32 bytes) {
    auto after = job.heap.upper_bound((u64)p);
    if (after == job.heap.begin()) return false;
    auto [start, size] = *--after;
    return (u64)p + bytes <= start + size;
}

static Place place_of(const Job& job, const Block& b, const char* p) {
    if (is_shared(b, p)) {
        int64_t offset = p - b.shared.start;
        for (u32 i = 0; i < job.launch.num_shared; ++i) {
            const SharedArray& a = job.launch.shared[i];
            if (offset >= a.offset && offset < a.offset + (int64_t)a.bytes) return {SHARED, (int32_t)i, offset - a.offset};
        }
        return {SHARED, -1, offset};
    }
    for (u32 i = 0; i < job.tensors.size(); ++i)
        if (p >= job.tensors[i].start && p < job.tensors[i].start + job.tensors[i].bytes)
            return {GLOBAL, (int32_t)i, p - job.tensors[i].start};
    return {GLOBAL, -1, (int64_t)p};
}
