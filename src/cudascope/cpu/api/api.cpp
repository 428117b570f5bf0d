// The CUDA runtime API for programs on the CPU, and the program itself: its main, its end, and the faults of its host code.
//
// kernels/program.py loads this library before the program's own. cpu/program.py compiles it, and changes the program's
// assembly so that host code calls the functions simt_program_… of this file: in a kernel they do what the runner does for
// every kernel, elsewhere what the host's libraries do.
#include <cstdarg>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <typeinfo>
#include <ucontext.h>

#include "devices.h"

struct ThreadLocal { u64 module, offset; };
extern "C" {
bool simt_in_kernel();
void* __tls_get_addr(ThreadLocal*);
[[noreturn]] void __cxa_throw(void*, std::type_info*, void (*)(void*));
void* simt_shared_at(const ThreadLocal*);
void simt_throw();
void simt_fail(const char*);
void simt_host_exit(int);
long long simt_clock();
int simt_printf(const char*, ...);
void simt_free_memory(void*);
}

static sigjmp_buf* main_end = nullptr;  // where a fault of the host ends main
static u64 fault_site, fault_address;
static struct sigaction before_us[_NSIG];

static void* program_base = nullptr;  // where the program's library is loaded

static bool is_of_program(void* code) {
    Dl_info info;
    return dladdr(code, &info) && info.dli_fbase == program_base;
}

// The innermost place in the program's own code, as a return address: a fault may be in a function of the host's libraries.
static u64 site_in_program(void* state) {
#if defined(__x86_64__)
    u64 at = (u64)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP];
#else
    u64 at = (u64)((ucontext_t*)state)->uc_mcontext.pc;
#endif
    if (is_of_program((void*)at)) return at + 1;
    void* frames[64];
    int number = backtrace(frames, 64);
    for (int i = 0; i < number; ++i)
        if (is_of_program(frames[i])) return (u64)frames[i];
    return 0;
}

static thread_local bool is_main_thread = false;
static int hang_signal() { return SIGRTMAX - 6; }  // kernels/program.py sends it

static void on_fault(int number, siginfo_t* info, void* state) {
    if (!simt_in_kernel() && is_main_thread && main_end && (info->si_code > 0 || number == hang_signal())) {
        fault_site = site_in_program(state), fault_address = number == SIGFPE ? 0 : (u64)info->si_addr;
        siglongjmp(*main_end, number);
    }
    if (number != hang_signal()) sigaction(number, &before_us[number], nullptr);  // the instruction is executed again
}

static void catch_faults() {
    struct sigaction action{};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, hang_signal()}) sigaction(number, &action, &before_us[number]);
    void* frame;
    backtrace(&frame, 1);  // the first call allocates
}

static void tell_fault(int number) {
    if (number == hang_signal())
        return find(fault_site, "hang", 0, "the host gets no further: it has called no function of CUDA for the time limit");
    AllocationRow* a = near((void*)fault_address);
    if (number == SIGFPE) return find(fault_site, "host fault", 0, "the host divides an integer by zero");
    if (a && a->kind != REGISTERED && a->freed)
        return find(fault_site, "use after free", fault_address, "the host touches memory that was freed");
    if (a && a->kind == DEVICE)
        return find(fault_site, "host access", fault_address, "the host touches memory of the device: copy it with cudaMemcpy");
    if (a && a->kind != REGISTERED)
        return find(fault_site, "host fault", fault_address, "the host touches memory past the ends of an allocation of CUDA");
    find(fault_site, "host fault", fault_address, "the host touches memory that is not there, at address %#llx",
        (unsigned long long)fault_address);
}

static void tell_leaks() {
    for (auto& [start, a] : allocations)
        if (!a.freed && a.kind != REGISTERED)
            find(a.site, "leak", a.start, "%llu bytes are never freed", (unsigned long long)a.bytes);
}

extern "C" {
void simt_program_start(const Callbacks* given, bool is_checked_run, u64* counts) {
    callbacks = *given, is_checked = is_checked_run, progress = counts;
    atexit(tell_leaks);  // after the destructors of the program's global objects
}
void simt_program_variables(const Variable* list, u64 number) { variables.assign(list, list + number); }

// The status of the program's main. A fault of the host ends main, and the status is that of a shell.
int simt_program_main(int (*main_function)(int, char**, char**), int num_arguments, char** arguments, char** environment) {
    sigjmp_buf end;
    is_main_thread = true;
    Dl_info info;
    if (dladdr((void*)main_function, &info)) program_base = info.dli_fbase;
    if (int number = sigsetjmp(end, 1)) {
        main_end = nullptr;
        tell_fault(number);
        fflush(nullptr);
        _exit(number == hang_signal() ? 124 : 128 + number);
    }
    main_end = &end;
    catch_faults();
    int status = main_function(num_arguments, arguments, environment);
    main_end = nullptr;
    return status;
}
// The allocations of a program, those that it has freed among them.
u64 simt_program_allocations(const AllocationRow** list) {
    rows.clear();
    for (auto& [start, a] : allocations) rows.push_back(a);
    *list = rows.data();
    return rows.size();
}
// Where the variables of the program are that may change, those of the device among them.
void simt_program_data(void* main_function, u64* start, u64* end) {
    struct Range { u64 function, start, end; } range{(u64)main_function, 0, 0};
    auto look = [](dl_phdr_info* info, size_t, void* data) {
        Range& range = *(Range*)data;
        u64 first = 0, last = 0, constants_end = 0;
        bool is_here = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& part = info->dlpi_phdr[i];
            u64 begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
            is_here |= part.p_type == PT_LOAD && range.function >= begin && range.function < end;
            if (part.p_type == PT_LOAD && part.p_flags & PF_W) first = begin, last = end;
            if (part.p_type == PT_GNU_RELRO) constants_end = end;
        }
        if (is_here) range.start = std::max(first, constants_end), range.end = last;
        return is_here ? 1 : 0;
    };
    dl_iterate_phdr(look, &range);
    *start = range.start, *end = range.end;
}
void simt_program_print(const char* text, u64 length) { fwrite(text, 1, length, stdout); }
void simt_program_end(int status) { exit(status); }

// -fsanitize=thread makes calls of the atomics of host code.
#define ATOMICS(bits, T)                                                                                                 \
    T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }              \
    void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }              \
    T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }    \
    T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }    \
    T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); }    \
    T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }    \
    T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }      \
    T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); }    \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {                       \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                   \
    }                                                                                                                    \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {                         \
        return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
    }
ATOMICS(8, u8) ATOMICS(16, uint16_t) ATOMICS(32, u32) ATOMICS(64, u64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

bool simt_on_host() { return !simt_in_kernel(); }

// The runtime takes the return address of its caller for the place in the kernel. So each `return` of one of its functions
// is a jump (-foptimize-sibling-calls).
void* simt_program_shared_at(ThreadLocal* variable) { return simt_in_kernel() ? simt_shared_at(variable) : __tls_get_addr(variable); }
void simt_program_throw(void* object, std::type_info* type, void (*destroy)(void*)) {
    if (simt_in_kernel()) return simt_throw();
    __cxa_throw(object, type, destroy);
}
void simt_program_fail(const char* message) {
    if (simt_in_kernel()) return simt_fail(message);
    fflush(stdout);
    fprintf(stderr, "%s\n", message);
    abort();
}
void simt_program_host_exit(int status) {
    if (simt_in_kernel()) return simt_host_exit(status);
    exit(status);
}
long long simt_program_clock() { return simt_in_kernel() ? simt_clock() : (long long)clock(); }
int simt_program_printf(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char line[1024];
    int length = simt_in_kernel() ? vsnprintf(line, sizeof(line), format, arguments) : vprintf(format, arguments);
    va_end(arguments);
    if (simt_in_kernel()) simt_printf("%s", line);
    return length;
}
void simt_program_free_memory(void* p) {
    if (simt_in_kernel()) return simt_free_memory(p);
    AllocationRow* a = near(p);
    if (!a || a->kind == REGISTERED) return simt_free_memory(p);
    find(CALLER, "invalid free", (u64)p, "free() of memory that CUDA has allocated: use cudaFree or cudaFreeHost");
}
}
