// Runs a CUDA kernel on the CPU. Threads are fibers, an OS thread runs a thread block, and all cores share the grid.
//
//   scheduling  A fiber runs until it waits (barrier, warp function) or ends. The last thread to arrive frees the others.
//               A fiber that runs for long loses its turn: it may wait for a store of another thread. A thread block that
//               only waits steps aside for the next one. If all threads wait, the launch ends with a deadlock that lists
//               the waits. A launch without progress for some time ends in the same way.
//   observing   The compiler's hooks (__tsan_*) announce every access. Lanes of a warp that execute an instruction for the
//               n-th time form one request.
//   checking    Every access is compared with the launch's tensors and shared arrays, and with the last accesses to the
//               same bytes. Two accesses race unless one happens before the other (order.h).
//
// Observed and checked launches run on one OS thread. cpu/build.py compiles this file and calls.cpp, and calls simt_launch.
#include <numeric>
#include <thread>

#include "interrupts.h"
#include "scheduler.h"

__thread Worker* worker = nullptr;
__thread Dim threadIdx, blockIdx, blockDim, gridDim;
std::mutex process_lock;

// An OS thread's part of a launch.
static void work(Job& job) {
    Worker w{};
    w.job = &job;
    static thread_local std::vector<char> alternate(64 << 10);  // a fault may be an overflow of the fiber's own stack
    stack_t signal_stack{}, old_stack{};
    signal_stack.ss_sp = alternate.data(), signal_stack.ss_size = alternate.size();
    sigaltstack(&signal_stack, &old_stack);
    worker = &w;
    w.asked_at = w.ticked = job.last_milestone = job.last_end = now();  // a busy machine may have started this thread late
    timer.set(FIRST_TICK, TICK);
    if (sigsetjmp(w.escape, 0) == 0) {
        run_blocks(w);
    } else {
        Error e = new_error(w, w.fault, (void*)w.fault_site);
        w.current = nullptr;
        raise_error(w, e);
    }
    timer.set(0, 0);
    {
        std::lock_guard<std::mutex> guard(job.lock);
        job.running--, job.in_vain.erase(&w);
    }
    worker = nullptr;
    sigaltstack(&old_stack, nullptr);
    for (size_t i = 0; i < w.blocks.size(); ++i) release_block(job, *w.blocks[i], i < 2);
}

template <class T>
static T* hand_over(const std::vector<T>& values) {
    T* out = (T*)malloc(std::max<size_t>(1, values.size() * sizeof(T)));
    if (!values.empty()) memcpy((void*)out, values.data(), values.size() * sizeof(T));
    return out;
}

// The results, and what was found, in the order of the thread blocks.
static void hand_over(Job& job) {
    Launch& launch = job.launch;
    for (size_t i = 1; i < job.found.size(); ++i)  // std::stable_sort takes long to compile, and there are few findings
        for (size_t j = i; j && job.found[j].rank < job.found[j - 1].rank; --j) std::swap(job.found[j], job.found[j - 1]);
    std::vector<Error> errors;
    for (const Found& found : job.found) errors.push_back(found.error);
    launch.errors = hand_over(errors), launch.num_errors = (u32)errors.size();
    std::vector<Count> counts;
    for (auto& [key, c] : job.counts) {
        std::tie(c.site, c.access, c.space) = key;
        counts.push_back(c);
    }
    launch.counts = hand_over(counts), launch.num_counts = counts.size();
    launch.executed = hand_over(job.executed), launch.num_executed = job.executed.size();
    launch.issued = hand_over(job.issued), launch.too_many_issues = job.too_many_issues;
    for (const auto& sectors : job.touched)
        for (u8 bits : sectors) {
            launch.sectors_read += (bits & TOUCHED_READ) > 0;
            launch.sectors_read_first += (bits & TOUCHED_READ_FIRST) > 0;
            launch.sectors_written += (bits & TOUCHED_WRITTEN) > 0;
        }
    launch.events = hand_over(job.trace), launch.num_events = job.trace.size();
    std::string output;
    if (job.order.empty())
        for (const auto& [number, text] : job.outputs) output += text;
    for (u32 number : job.order) {
        auto found = job.outputs.find(number);
        if (found != job.outputs.end()) output += found->second;
    }
    launch.output = hand_over(std::vector<char>(output.begin(), output.end()));
    launch.num_output = output.size();
}

static void run(Launch* launch, void*& python) {
    Job job(*launch);
    job.python = python;
    if (launch->shuffled) {
        job.order.resize(job.num_blocks);
        std::iota(job.order.begin(), job.order.end(), 0);
        std::shuffle(job.order.begin(), job.order.end(), std::mt19937_64(launch->seed));
    }
    find_code(job);
    Signals signals;
    map_tensors(job);
    {
        std::vector<std::thread> helpers;
        if (launch->mode != PLAIN) launch->workers = 1;
        launch->workers = std::min(launch->workers, job.num_blocks);
        job.running = launch->workers;
        for (u32 i = 1; i < launch->workers; ++i) helpers.emplace_back([&] { work(job); });
        work(job);
        for (std::thread& helper : helpers) helper.join();
    }
    Error error = unmap_tensors(job);
    if (error.finding && job.found.empty()) job.found.push_back({0, error});
    hand_over(job);
    python = job.python;
}

// Python calls it with its lock held. Other Python threads run while the kernel does.
extern "C" void simt_launch(Launch* launch) {
    void* python = PyEval_SaveThread();
    run(launch, python);
    PyEval_RestoreThread(python);
}

extern "C" void simt_free(Launch* launch) {
    free(launch->errors), free(launch->counts), free(launch->events), free(launch->output), free(launch->executed);
    free(launch->issued);
}

extern "C" u64 simt_sizeof_launch() { return sizeof(Launch); }
