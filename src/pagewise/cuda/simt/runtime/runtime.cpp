// Runs a CUDA kernel on the CPU: threads as fibers, a thread block on one OS thread, thread blocks spread over cores.
//
//   scheduling  a fiber runs until it waits (barrier, warp function) or ends; whoever arrives last frees the others.
//               When nobody can run and somebody waits, that is a deadlock, reported with what each waits for.
//   observing   the compiler's hooks (__tsan_*) tell every access before it happens; the lanes of a warp are matched
//               into one request by (instruction, how many times this lane has executed it).
//   checking    every access is held against the launch's tensors and shared arrays, and against the last accesses to
//               the same bytes: two of them race unless one happens before the other.
//               Happens before: program order; __syncthreads within a thread block; __syncwarp within a warp;
//               between thread blocks a __threadfence followed by an atomic that the other block's atomic sees.
//
// Observed and checked launches run on one OS thread. simt/build.py compiles this file once and calls simt_launch.
#include <thread>

#include "calls.h"
#include "scheduler.h"

template <class T>
static T* hand_over(const std::vector<T>& values) {
    T* out = (T*)malloc(std::max<size_t>(1, values.size() * sizeof(T)));
    if (!values.empty()) memcpy(out, values.data(), values.size() * sizeof(T));
    return out;
}

extern "C" void simt_launch(Launch* launch) {
    Job job(*launch);
    u64 blocks = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2];
    job.order.resize(blocks);
    for (u32 i = 0; i < blocks; ++i) job.order[i] = i;
    if (launch->shuffled) std::shuffle(job.order.begin(), job.order.end(), std::mt19937_64(launch->seed));
    if (launch->mode != PLAIN) map_shared(job), map_tensors(job);

    static std::mutex signals;  // launches from several Python threads share the process's signal handlers
    static int launches = 0;
    static struct sigaction old_actions[std::size(FAULTS)];
    {
        std::lock_guard<std::mutex> guard(signals);
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        if (launches++ == 0)
            for (size_t i = 0; i < std::size(FAULTS); ++i) sigaction(FAULTS[i], &action, &old_actions[i]);
    }
    std::vector<std::thread> helpers;
    u32 workers = launch->mode == PLAIN ? std::min<u64>(launch->workers, blocks) : 1;
    for (u32 i = 1; i < workers; ++i) helpers.emplace_back([&] { work(job); });
    work(job);
    for (std::thread& helper : helpers) helper.join();
    {
        std::lock_guard<std::mutex> guard(signals);
        if (--launches == 0)
            for (size_t i = 0; i < std::size(FAULTS); ++i) sigaction(FAULTS[i], &old_actions[i], nullptr);
    }

    if (launch->mode != PLAIN) unmap(job);
    std::vector<Count> counts;
    for (auto& [key, c] : job.counts) {
        std::tie(c.site, c.access, c.space) = key;
        counts.push_back(c);
    }
    launch->counts = hand_over(counts), launch->num_counts = counts.size();
    launch->events = hand_over(job.trace), launch->num_events = job.trace.size();
    std::string output;
    for (u32 number : job.order) {
        auto found = job.outputs.find(number);
        if (found != job.outputs.end()) output += found->second;
    }
    launch->output = hand_over(std::vector<char>(output.begin(), output.end()));
    launch->num_output = output.size();
}

extern "C" void simt_free(Launch* launch) { free(launch->counts), free(launch->events), free(launch->output); }

extern "C" u64 simt_sizeof_launch() { return sizeof(Launch); }
