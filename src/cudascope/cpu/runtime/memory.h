// The memory of a launch: where its tensors and shared arrays lie while it runs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <thread>

#include "pages.h"

constexpr u64 SPACE = 64ull << 30, SMALL = 256 << 10;
constexpr u8 CANARY = 0xa5;  // round a tensor, as far as its pages go

// ---------------------------------------------------------------------------------------------- arenas

// Pages with empty space before and after them, as large as the machine allows. The arena starts with the same number of
// pages again. They keep a copy of a tensor's values before the launch. Arenas are kept for the next launch, because fresh
// memory costs a fault per page.
struct Arena { char *start, *pages; u64 bytes, page_bytes; };
constexpr u64 SPARE = 64 << 20;  // bytes of spare arenas at most, their copies not counted
static std::vector<Arena> spare_arenas;
static u64 spare_bytes = 0;
static std::vector<Stacks> spare_stacks;

static Arena take_arena(u64 page_bytes) {
    constexpr u64 HUGE_PAGE = 2 << 20;
    {
        std::lock_guard<std::mutex> guard(process_lock);
        for (size_t i = spare_arenas.size(); i--;)
            if (spare_arenas[i].page_bytes == page_bytes) {
                Arena arena = spare_arenas[i];
                spare_arenas.erase(spare_arenas.begin() + (int)i);
                spare_bytes -= page_bytes;
                return arena;
            }
    }
    for (u64 space = SPACE; space >= HUGE_PAGE; space /= 4) {
        u64 bytes = 2 * space + 2 * page_bytes;
        char* start = reserve(bytes, PROT_NONE);
        if (!start) continue;
        char* pages = (char*)up((u64)start + page_bytes + space / 2, HUGE_PAGE);
        bool made = true;
        for (char* memory : {start, pages}) {
            made &= mprotect(memory, page_bytes, PROT_READ | PROT_WRITE) == 0;
            if (page_bytes > SMALL) madvise(memory, page_bytes, MADV_HUGEPAGE);
        }
        if (made) return {start, pages, bytes, page_bytes};
        munmap(start, bytes);
    }
    return {};
}

static void give_back(const Shadow& s) {
    if (!s.spoiled && s.page_bytes <= SPARE / 4) {
        std::lock_guard<std::mutex> guard(process_lock);
        spare_arenas.push_back({s.arena, s.pages, s.arena_bytes, s.page_bytes});
        spare_bytes += s.page_bytes;
        while (spare_arenas.size() > 64 || spare_bytes > SPARE) {  // the oldest goes
            munmap(spare_arenas[0].start, spare_arenas[0].bytes);
            spare_bytes -= spare_arenas[0].page_bytes;
            spare_arenas.erase(spare_arenas.begin());
        }
        return;
    }
    munmap(s.arena, s.arena_bytes);
}

static void place(Shadow& s, const Arena& arena) {
    s.arena = arena.start, s.arena_bytes = arena.bytes, s.pages = arena.pages, s.page_bytes = arena.page_bytes;
}

// ---------------------------------------------------------------------------------------------- shared memory

// Protect the rest of the largest possible dynamic part, or allow access to it again.
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
        std::lock_guard<std::mutex> guard(process_lock);
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
    std::lock_guard<std::mutex> guard(process_lock);
    if (keep && spare_stacks.size() < 64) spare_stacks.push_back(b.stacks);
    else munmap(b.stacks.start, STACK * b.stacks.threads);
}

// ---------------------------------------------------------------------------------------------- tensors

// A launch works on copies of its tensors, with empty space round each copy, so that a stray index meets nothing. When the
// launch ends, the elements that it has changed are copied back. Other elements keep the values that other threads of the
// process have stored meanwhile. Two kinds of tensors stay where they are. A plain launch does not copy a large tensor that
// it only reads: the copy can take longer than the launch. A tensor also stays if the kernel reaches it by a pointer in a
// struct, in a variable or in another tensor.

static thread_local sigjmp_buf* volatile copying = nullptr;  // where a fault of the copying continues

// Copy from or to memory of the caller. False: that memory is not there, or cannot be written.
template <class Copy>
static bool survives(Copy copy) {
    sigjmp_buf escape;
    if (sigsetjmp(escape, 0)) return copying = nullptr, false;
    copying = &escape;
    copy();
    copying = nullptr;
    return true;
}

static bool map_tensor(Shadow& s, Mode mode) {
    bool plain = mode == PLAIN;
    // Memory of a GPU begins at a multiple of 256 bytes (programming guide, device memory accesses), whatever numpy's
    // begins at. In a view the caller may have chosen an element that is aligned. The copy of a plain launch ends as near
    // to the empty space as an alignment lets it that wmma accepts, or that vectors need.
    u64 alignment = !plain ? 256 : s.bytes % 32 == 0 || s.bytes >= 512 ? 32 : 16;
    u64 before = s.is_viewed ? (u64)s.original % alignment : 0;
    if (!plain) before += (u64)s.original % PAGE / alignment * alignment;
    u64 pages = up(before + s.bytes, PAGE);
    Arena arena = take_arena(pages);
    if (!arena.start) return true;  // without memory for a copy, the tensor stays where it is
    place(s, arena);
    if (plain) before += (pages - s.bytes - before) / alignment * alignment;
    s.start = s.pages + before;
    char* end = s.start + s.bytes;
    memset(s.pages, CANARY, before);
    memset(end, CANARY, (size_t)(s.pages + pages - end));
    return survives([&] {
        memcpy(s.start, s.original, s.bytes);
        // the hooks of a checked launch announce a store to a tensor that the kernel promises not to write
        if (mode != CHECK || !s.constant) s.keep();
    });
}

static bool is_intact(const char* from, const char* to) {
    return from == to || ((u8)*from == CANARY && memcmp(from, from + 1, (size_t)(to - from - 1)) == 0);
}

// The address in the caller's memory, if `value` is an address in a copy or the end of a copy.
static u64 as_original(const Job& job, u64 value) {
    if (value < job.first_copy || value > job.last_copy) return value;
    for (const Shadow& s : job.tensors)
        if (s.arena && value - (u64)s.start <= s.bytes) return value - (u64)s.start + (u64)s.original;
    return value;
}

// Store in `to` the elements of `from` that differ from `was`.
template <class Element>
static void copy_changes(const Job& job, char* to, const char* from, const char* was, u64 bytes) {
    for (u64 piece = 0; piece < bytes; piece += PAGE) {
        u64 length = std::min(PAGE, bytes - piece);
        if (memcmp(from + piece, was + piece, length) == 0) continue;
        u64 end = piece + length, i = piece;
        for (Element now, then; i + sizeof(Element) <= end; i += sizeof(Element)) {
            memcpy(&now, from + i, sizeof(now)), memcpy(&then, was + i, sizeof(then));
            if (now == then) continue;
            if (sizeof(now) == 8) now = (Element)as_original(job, now);
            memcpy(to + i, &now, sizeof(now));
        }
        for (; i < end; ++i)
            if (from[i] != was[i]) to[i] = from[i];
    }
}

// Take the results back.
static FindingKind unmap_tensor(const Job& job, Shadow& s) {
    char* end = s.start + s.bytes;
    auto copy = s.granule % 8 == 0   ? copy_changes<u64>
                : s.granule % 4 == 0 ? copy_changes<u32>
                : s.granule % 2 == 0 ? copy_changes<u16>
                                     : copy_changes<u8>;
    auto copy_back = [&] { copy(job, s.original, s.start, s.snapshot(), s.bytes); };
    FindingKind found = !s.is_kept || survives(copy_back) ? NOTHING : READ_ONLY;
    if (!is_intact(s.pages, s.start) || !is_intact(end, s.pages + s.page_bytes)) found = OVERRUN;
    give_back(s);
    return found;
}

// Launches that share a tensor, and one of which may write it, take turns. A launch by a signal's handler of Python does
// not wait for the launch that the signal interrupts.
struct InUse { const Job* job; char *start, *end; bool shared; std::thread::id thread; };
static std::vector<InUse> in_use;
static std::condition_variable use_ended;

static void ask_python(Job& job);

static void wait_for_turn(Job& job) {
    bool plain = job.launch.mode == PLAIN;
    auto me = std::this_thread::get_id();
    auto conflicts = [&](const InUse& use) {
        for (const Shadow& s : job.tensors)
            if (s.original < use.end && use.start < s.original + s.bytes && !(plain && s.constant && use.shared))
                return use.thread != me;
        return false;
    };
    std::unique_lock<std::mutex> guard(process_lock);
    while (!job.stop && std::any_of(in_use.begin(), in_use.end(), conflicts)) {
        if (use_ended.wait_for(guard, std::chrono::milliseconds(100)) == std::cv_status::no_timeout) continue;
        guard.unlock();
        ask_python(job);
        guard.lock();
    }
    for (const Shadow& s : job.tensors)
        in_use.push_back({&job, s.original, s.original + s.bytes, plain && s.constant, me});
}

template <class Function>
static void for_each_word(char* words, u64 bytes, Function function) {
    u64 value;
    for (u64 i = 0; i + 8 <= bytes; i += 8) memcpy(&value, words + i, 8), function(value, words + i);
}

// A tensor stays where it is if its address is in a variable or in another tensor.
static void find_pointers(Job& job) {
    u64 lowest = ~0ull, highest = 0;
    for (const Shadow& s : job.tensors)
        lowest = std::min(lowest, (u64)s.original), highest = std::max(highest, (u64)s.original + s.bytes);
    auto look = [&](u64 value, char*) {
        if (value < lowest || value >= highest) return;
        for (Shadow& s : job.tensors) s.stays |= value - (u64)s.original < s.bytes;
    };
    for (u32 i = 0; i < job.launch.num_variables; ++i)
        for_each_word((char*)job.launch.variables[i].offset, job.launch.variables[i].bytes, look);
    for (const Shadow& table : job.tensors)
        if (table.granule == 8) survives([&] { for_each_word(table.original, table.bytes, look); });
}

// The kernel may have stored the address of a copy where it stays. The copy is about to end.
static void return_pointers(Job& job) {
    auto restore = [&](u64 value, char* at) {
        u64 address = as_original(job, value);
        if (address != value) memcpy(at, &address, 8);
    };
    for (u32 i = 0; i < job.launch.num_variables; ++i)
        for_each_word((char*)job.launch.variables[i].offset, job.launch.variables[i].bytes, restore);
    for (const Shadow& table : job.tensors)
        if (table.granule == 8 && !table.arena && !table.constant)
            survives([&] { for_each_word(table.original, table.bytes, restore); });
}

static void map_tensors(Job& job) {
    Launch& launch = job.launch;
    u64 threads = (u64)job.num_blocks * job.num_threads;
    job.tensors = std::vector<Shadow>(launch.num_regions);
    for (u32 i = 0; i < launch.num_regions; ++i) {
        const Region& region = launch.regions[i];
        Shadow& s = job.tensors[i];
        s.start = s.original = (char*)region.start;
        s.bytes = region.bytes, s.granule = region.granule, s.constant = region.constant;
        s.stays = region.in_place || (launch.mode == PLAIN && s.constant && s.bytes > SMALL);
        if (launch.mode == CHECK) {
            s.cell_bytes = (region.bytes / region.granule + 1) * sizeof(Cell);
            s.cells = (Cell*)reserve(s.cell_bytes, PROT_READ | PROT_WRITE);
            // Huge pages save most of the faults. A launch with few threads would leave most of a huge page unused.
            if (region.bytes / region.granule <= 16 * threads) madvise(s.cells, s.cell_bytes, MADV_HUGEPAGE);
        }
    }
    wait_for_turn(job);
    if (job.stop) job.failed = true;
    find_pointers(job);
    for (u32 i = 0; i < launch.num_pointers; ++i) {
        Shadow& s = job.tensors[launch.pointer_regions[i]];
        s.is_viewed |= *(char**)launch.arguments[launch.pointers[i]] != s.original;
    }
    for (u32 i = 0; i < launch.num_regions && !job.failed; ++i) {
        Shadow& s = job.tensors[i];
        if (s.stays || map_tensor(s, (Mode)launch.mode)) {
            if (s.arena) job.first_copy = std::min(job.first_copy, (u64)s.start);
            if (s.arena) job.last_copy = std::max(job.last_copy, (u64)s.start + s.bytes);
            continue;
        }
        Error error{};
        error.finding = UNREADABLE, error.region = (int)i, error.count = 1;
        job.found.push_back({0, error});
        job.failed = true;
    }
    for (u32 i = 0; i < launch.num_pointers; ++i) {
        const Shadow& s = job.tensors[launch.pointer_regions[i]];
        *(u64*)launch.arguments[launch.pointers[i]] += (u64)s.start - (u64)s.original;
    }
}

// Copy the results back. Return what is wrong with the first tensor that has an error.
static Error unmap_tensors(Job& job) {
    Error error{};
    return_pointers(job);
    for (u32 i = 0; i < job.tensors.size(); ++i) {
        Shadow& s = job.tensors[i];
        if (s.cells) munmap(s.cells, s.cell_bytes);
        FindingKind found = s.arena ? unmap_tensor(job, s) : NOTHING;
        if (found && !error.finding) error.finding = found, error.region = (int)i, error.count = 1;
    }
    std::lock_guard<std::mutex> guard(process_lock);
    in_use.erase(std::remove_if(in_use.begin(), in_use.end(), [&](const InUse& u) { return u.job == &job; }), in_use.end());
    use_ended.notify_all();
    return error;
}
