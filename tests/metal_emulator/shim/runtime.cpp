// Runs a Metal body on the CPU, one threadgroup after another: each of its threads is a fiber with its own stack.
//
// A fiber runs until it waits (barrier, or a meeting of its simdgroup's lanes) or ends. Whose turn it is, and which
// threadgroup comes next, is drawn at random, so that a result that hangs on an order shows. Found and reported as text:
// * a place that only some lanes or threads reach (divergence);
// * a load or store outside all buffers, a store to an input, a load of threadgroup memory that nobody has written;
// * two threads of one threadgroup touching the same threadgroup memory, one of them storing, with no barrier between;
// * two threads storing to the same place of an output, or one loading what another stores;
// * more than 32 KB of threadgroup memory; an index past an array; a shift, division or addition that C++ leaves open.
// Loads and stores come in through the compiler's ThreadSanitizer hooks, whose functions stand at the end of this file.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#define EMU_UCONTEXT
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

typedef uint32_t uint;
typedef uint uint3 __attribute__((ext_vector_type(3)));

// Both mirror msl.h.
struct EmuThread {
    uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
    uint3 threads_per_threadgroup, threads_per_grid, threadgroups_per_grid;
    uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
    uint simdgroups_per_threadgroup, threads_per_simdgroup;
};
struct EmuBoard { uint words[32][4]; };

struct EmuBuffer {  // mirrors emulator.py
    uint8_t* base;
    uint64_t num_bytes;
    uint32_t writable;
    uint32_t num_unwritten;  // out: bytes that no thread stored
    uint64_t num_loaded;     // out: bytes that threads loaded, each as often as it was
    const char* name;
};

namespace {
const uint MOST_THREADS = 1024, LANES = 32, MOST_SIMDGROUPS = MOST_THREADS / LANES;
const uint LIMIT_BYTES = 32768, RED_ZONE = 64, ARENA_BYTES = 3 * LIMIT_BYTES, MOST_ARRAYS = 16, GRANULE = 2;
const size_t STACK_BYTES = 64 << 10;

enum State { READY, AT_MEETING, AT_BARRIER, AT_SIMD_BARRIER, ENDED };

struct Fiber {
#ifdef EMU_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer;
#endif
    uint8_t* stack;
    State state;
    bool orders;  // whether the barrier it came to last is one for threadgroup memory
    uint line, column, num_meetings;
    const char* what;
    EmuThread own;
};
struct Simdgroup {
    EmuBoard boards[2];  // a lane is at most one meeting ahead of another
    uint num_barriers;
};
struct Cell {  // what is known of two bytes of threadgroup memory
    uint written_in, write_epoch, write_simd_epoch, read_epoch, read_simds, read_simd_epoch;
    uint16_t writer, reader;
    bool several_readers;
};
struct Array { uint id, offset, num_bytes; const char* name; };

Fiber fibers[MOST_THREADS];
Simdgroup simdgroups[MOST_SIMDGROUPS];
Cell cells[ARENA_BYTES / GRANULE];
Array arrays[MOST_ARRAYS];
uint num_arrays, arena_used, arena_payload;
uint8_t* arena;
uint8_t* stacks;

Fiber* current;
#ifdef EMU_UCONTEXT
ucontext_t scheduler_context;
#else
void* scheduler_stack_pointer;
#endif
void (*entry)(void**);
void** entry_buffers;
EmuBuffer* buffers;
uint num_buffers;
uint32_t** owners;  // of an output: who stored each byte, 0 nobody, else the thread's number in the grid + 1
uint num_threads, group_serial, epoch;
bool failed;
char* message;
uint message_size;
sigjmp_buf crashed;
pthread_t runner;
volatile sig_atomic_t running;
uint64_t random_state;

uint random_below(uint n) {  // xorshift*, good enough for an order
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return uint((random_state * 0x2545F4914F6CDD1DULL >> 32) * uint64_t(n) >> 32);
}
void shuffle(uint* order, uint n) {
    for (uint i = n; i > 1; --i) {
        const uint j = random_below(i), kept = order[i - 1];
        order[i - 1] = order[j], order[j] = kept;
    }
}
}  // namespace

#ifndef EMU_UCONTEXT
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".globl emu_switch\n.hidden emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#else
asm(".globl emu_switch\n.hidden emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n");
#endif
#endif

static void to_scheduler() {
#ifdef EMU_UCONTEXT
    swapcontext(&current->context, &scheduler_context);
#else
    emu_switch(&current->stack_pointer, scheduler_stack_pointer);
#endif
}
static void to_fiber(Fiber* fiber) {
    current = fiber;
#ifdef EMU_UCONTEXT
    swapcontext(&scheduler_context, &fiber->context);
#else
    emu_switch(&scheduler_stack_pointer, fiber->stack_pointer);
#endif
    current = nullptr;
}

static void say(const char* format, ...) {
    if (failed) return;
    failed = true;
    int used = 0;
    if (current) {
        const uint3 at = current->own.threadgroup_position_in_grid;
        used = snprintf(message, message_size, "threadgroup (%u, %u, %u), thread %u: ", at.x, at.y, at.z,
                        current->own.thread_index_in_threadgroup);
    }
    va_list rest;
    va_start(rest, format);
    vsnprintf(message + used, message_size - uint(used), format, rest);
    va_end(rest);
}
static void fail_if_said() {  // a fiber that failed never goes on
    while (failed) to_scheduler();
}

// ---- what the body calls ----
extern "C" const EmuThread* emu_thread() { return &current->own; }

static void wait_as(State state, const char* what, uint line, uint column) {
    current->state = state, current->what = what, current->line = line, current->column = column;
    to_scheduler();
    fail_if_said();
}
extern "C" const EmuBoard* emu_meet(const char* what, uint line, uint column, const uint* words, uint num_words) {
    Fiber* self = current;
    Simdgroup& simd = simdgroups[self->own.simdgroup_index_in_threadgroup];
    EmuBoard* board = &simd.boards[self->num_meetings++ & 1u];
    for (uint i = 0; i < num_words; ++i) board->words[self->own.thread_index_in_simdgroup][i] = words[i];
    wait_as(AT_MEETING, what, line, column);
    return board;
}
extern "C" void emu_barrier(bool whole_threadgroup, bool orders, uint line, uint column) {
    current->orders = orders;
    if (whole_threadgroup) wait_as(AT_BARRIER, "threadgroup_barrier", line, column);
    else wait_as(AT_SIMD_BARRIER, "simdgroup_barrier", line, column);
}
extern "C" void* emu_threadgroup_memory(uint id, size_t bytes, const char* name) {
    for (uint i = 0; i < num_arrays; ++i)
        if (arrays[i].id == id) return arena + arrays[i].offset;
    arena_payload += uint(bytes);
    if (arena_payload > LIMIT_BYTES || num_arrays == MOST_ARRAYS) {
        say("%u bytes of threadgroup memory with %s, the limit is %u", arena_payload, name, LIMIT_BYTES);
        fail_if_said();
    }
    const uint offset = (arena_used + RED_ZONE + 15u) / 16u * 16u;
    arrays[num_arrays++] = Array{id, offset, uint(bytes), name};
    arena_used = offset + uint(bytes);
    return arena + offset;
}
extern "C" float emu_exp(float x) { return expf(x); }
extern "C" float emu_exp2(float x) { return exp2f(x); }
extern "C" float emu_log(float x) { return logf(x); }
extern "C" float emu_log2(float x) { return log2f(x); }
extern "C" float emu_sqrt(float x) { return sqrtf(x); }

// ---- what a load or store may do ----
static void touch_threadgroup(uint first, uint bytes, bool writes) {
    const Array* array = nullptr;
    for (uint i = 0; i < num_arrays; ++i)
        if (first >= arrays[i].offset && first + bytes <= arrays[i].offset + arrays[i].num_bytes) array = &arrays[i];
    if (!array) return say("touches threadgroup memory outside all arrays");
    const uint self = current->own.thread_index_in_threadgroup, simd = current->own.simdgroup_index_in_threadgroup;
    const uint simd_epoch = simdgroups[simd].num_barriers;
    for (uint at = first / GRANULE; at * GRANULE < first + bytes; ++at) {
        Cell& cell = cells[at];
        const uint place = at * GRANULE - array->offset;
        const bool written = cell.written_in == group_serial;
        if (!writes && !written) return say("loads %s[byte %u], which nobody has stored", array->name, place);
        if (written && cell.write_epoch == epoch && cell.writer != self &&
            !(cell.writer / LANES == simd && cell.write_simd_epoch < simd_epoch))
            return say("%s %s[byte %u], stored by thread %u with no barrier between", writes ? "stores" : "loads", array->name,
                       place, cell.writer);
        if (!writes) {
            if (cell.read_epoch != epoch) cell.read_epoch = epoch, cell.read_simds = 0;
            const bool first_of_simd = cell.read_simds != 1u << simd || cell.read_simd_epoch != simd_epoch;
            cell.several_readers = !first_of_simd && (cell.several_readers || cell.reader != self);
            if (first_of_simd) cell.reader = uint16_t(self), cell.read_simd_epoch = simd_epoch;
            cell.read_simds |= 1u << simd;
            continue;
        }
        if (cell.read_epoch == epoch && cell.read_simds) {
            const bool others = cell.read_simds != 1u << simd;
            if (others || (cell.read_simd_epoch == simd_epoch && (cell.several_readers || cell.reader != self)))
                return say("stores %s[byte %u], loaded by another thread with no barrier between", array->name, place);
        }
        cell.written_in = group_serial, cell.write_epoch = epoch, cell.write_simd_epoch = simd_epoch;
        cell.writer = uint16_t(self);
    }
}
static void touch_buffer(uint which, uint64_t first, uint bytes, bool writes) {
    EmuBuffer& buffer = buffers[which];
    buffer.num_loaded += writes ? 0 : bytes;
    if (!buffer.writable) {
        if (writes) say("stores to the input %s", buffer.name);
        return;
    }
    const uint3 at = current->own.thread_position_in_grid, size = current->own.threads_per_grid;
    const uint self = (at.z * size.y + at.y) * size.x + at.x + 1;
    for (uint64_t place = first; place < first + bytes; ++place) {
        uint32_t& owner = owners[which][place];
        if (owner && owner != self)
            return say("%s %s[byte %lu], which another thread stored", writes ? "stores" : "loads", buffer.name,
                       (unsigned long)place);
        if (!writes && !owner) return say("loads the output %s before storing it", buffer.name);
        if (writes) owner = self;
    }
}
static void touch(const void* address, uint bytes, bool writes) {
    if (!current || failed) return;
    const uint8_t* at = static_cast<const uint8_t*>(address);
    if (at >= current->stack && at + bytes <= current->stack + STACK_BYTES) return;
    if (at >= arena && at < arena + ARENA_BYTES) {
        touch_threadgroup(uint(at - arena), bytes, writes);
    } else {
        for (uint i = 0; i < num_buffers; ++i)
            if (at >= buffers[i].base && at + bytes <= buffers[i].base + buffers[i].num_bytes) {
                touch_buffer(i, uint64_t(at - buffers[i].base), bytes, writes);
                return fail_if_said();
            }
        const EmuBuffer* nearest = nullptr;
        int64_t distance = 65536;
        for (uint i = 0; i < num_buffers; ++i) {
            const int64_t below = buffers[i].base - at, above = at + bytes - (buffers[i].base + buffers[i].num_bytes);
            const int64_t off = below > above ? below : above;
            if (off < distance) nearest = &buffers[i], distance = off;
        }
        if (nearest)
            say("%s near %s, byte %ld of %lu", writes ? "stores" : "loads", nearest->name, long(at - nearest->base),
                (unsigned long)nearest->num_bytes);
        else
            say("%s outside all buffers", writes ? "stores" : "loads");
    }
    fail_if_said();
}
extern "C" void emu_touch(const void* address, size_t bytes, bool writes) { touch(address, uint(bytes), writes); }

// ---- the scheduler ----
static void fiber_main() {
    entry(entry_buffers);
    current->state = ENDED;
    to_scheduler();
    __builtin_unreachable();
}
static void start_fiber(Fiber& fiber, uint index) {
    fiber.stack = stacks + index * STACK_BYTES;
    fiber.state = READY, fiber.num_meetings = 0;
#ifdef EMU_UCONTEXT
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack, fiber.context.uc_stack.ss_size = STACK_BYTES, fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#else
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES);
#if defined(__x86_64__)
    *--top = nullptr;  // a return address that no one uses: the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
    top -= 20;
    for (int i = 0; i < 20; ++i) top[i] = nullptr;
    top[11] = reinterpret_cast<void*>(fiber_main);  // x30
#endif
    fiber.stack_pointer = top;
#endif
}
static bool same_place(const Fiber& a, const Fiber& b) {
    return a.state == b.state && a.line == b.line && a.column == b.column && a.what == b.what;
}
// Lets the fibers [first, first + count) go on if all wait at one place as `state` says; says so if they can never meet.
static bool release(uint first, uint count, State state) {
    for (uint i = first; i < first + count; ++i)
        if (fibers[i].state != state || !same_place(fibers[i], fibers[first])) return false;
    for (uint i = first; i < first + count; ++i) fibers[i].state = READY;
    return true;
}
static void say_stuck() {
    const Fiber* waiting = nullptr;
    for (uint i = 0; i < num_threads; ++i) if (fibers[i].state != ENDED) waiting = waiting ? waiting : &fibers[i];
    for (uint i = 0; i < num_threads; ++i) {
        const Fiber& other = fibers[i];
        const bool apart = other.state == ENDED || !same_place(other, *waiting);
        if (!apart) continue;
        return say("thread %u waits at %s (line %u) while thread %u %s%s (line %u): divergence",
                   waiting->own.thread_index_in_threadgroup, waiting->what, waiting->line, i,
                   other.state == ENDED ? "has ended" : "waits at ", other.state == ENDED ? "" : other.what, other.line);
    }
    say("threads wait for each other for ever");
}
static void run_threadgroup(uint* order) {
    ++group_serial, ++epoch;
    memset(arena, 0xff, ARENA_BYTES);
    shuffle(order, num_threads);
    uint num_ended = 0;
    while (num_ended < num_threads && !failed) {
        bool moved = false;
        for (uint i = 0; i < num_threads && !failed; ++i) {
            Fiber& fiber = fibers[order[i]];
            if (fiber.state != READY) continue;
            moved = true;
            to_fiber(&fiber);
            num_ended += fiber.state == ENDED;
        }
        for (uint simd = 0; simd < num_threads / LANES && !failed; ++simd) {
            moved |= release(simd * LANES, LANES, AT_MEETING);
            if (release(simd * LANES, LANES, AT_SIMD_BARRIER))
                simdgroups[simd].num_barriers += fibers[simd * LANES].orders, moved = true;
        }
        if (!failed && release(0, num_threads, AT_BARRIER)) epoch += fibers[0].orders, moved = true;
        if (!failed && !moved) say_stuck();
        if (random_below(4) == 0) shuffle(order, num_threads);
    }
}
static void on_crash(int signal_number, siginfo_t*, void*) {
    if (running && pthread_equal(pthread_self(), runner)) siglongjmp(crashed, signal_number);
    signal(signal_number, SIG_DFL);
}
static void run_grid(const uint* grid, const uint* group) {
    const uint3 size = {group[0] < grid[0] ? group[0] : grid[0], group[1] < grid[1] ? group[1] : grid[1],
                        group[2] < grid[2] ? group[2] : grid[2]};
    const uint3 whole = {grid[0], grid[1], grid[2]};
    const uint3 count = {(whole.x + size.x - 1) / size.x, (whole.y + size.y - 1) / size.y, (whole.z + size.z - 1) / size.z};
    const uint num_groups = count.x * count.y * count.z;
    num_threads = size.x * size.y * size.z;
    uint* groups = static_cast<uint*>(malloc(num_groups * sizeof(uint)));
    uint order[MOST_THREADS];
    for (uint i = 0; i < num_groups; ++i) groups[i] = i;
    for (uint i = 0; i < num_threads; ++i) order[i] = i;
    shuffle(groups, num_groups);
    for (uint g = 0; g < num_groups && !failed; ++g) {
        const uint3 at = {groups[g] % count.x, groups[g] / count.x % count.y, groups[g] / (count.x * count.y)};
        for (uint i = 0; i < num_threads; ++i) {
            EmuThread& own = fibers[i].own;
            own.thread_position_in_threadgroup = uint3{i % size.x, i / size.x % size.y, i / (size.x * size.y)};
            own.threadgroup_position_in_grid = at, own.threads_per_threadgroup = size, own.threads_per_grid = whole;
            own.thread_position_in_grid = at * size + own.thread_position_in_threadgroup, own.threadgroups_per_grid = count;
            own.thread_index_in_threadgroup = i, own.thread_index_in_simdgroup = i % LANES;
            own.simdgroup_index_in_threadgroup = i / LANES, own.simdgroups_per_threadgroup = num_threads / LANES;
            own.threads_per_simdgroup = LANES;
            start_fiber(fibers[i], i);
        }
        run_threadgroup(order);
    }
    free(groups);
}
static bool prepare() {
    if (arena) return true;
    void* mapped = mmap(nullptr, ARENA_BYTES + MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return false;
    stacks = static_cast<uint8_t*>(mapped), arena = stacks + MOST_THREADS * STACK_BYTES;
    return true;
}
// The grid's size and the threadgroup's are in threads, and the first is a multiple of the second (emulator.py checks).
// Returns the bytes of threadgroup memory used, or -1 with a message.
extern "C" int emu_run(void (*body)(void**), void** arguments, EmuBuffer* all, uint count, const uint* grid, const uint* group,
                       uint64_t seed, char* text, uint text_size) {
    entry = body, entry_buffers = arguments, buffers = all, num_buffers = count, message = text, message_size = text_size;
    failed = false, current = nullptr, num_arrays = 0, arena_used = 0, arena_payload = 0;
    random_state = seed * 2 + 1;
    if (!prepare()) return say("no memory for stacks"), -1;
    owners = static_cast<uint32_t**>(calloc(count, sizeof(uint32_t*)));
    for (uint i = 0; i < count; ++i)
        if (all[i].writable) owners[i] = static_cast<uint32_t*>(calloc(all[i].num_bytes + 1, sizeof(uint32_t)));
    struct sigaction ours, kept[3];
    memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = on_crash, ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
    runner = pthread_self();
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &ours, &kept[i]);
    running = 1;
    const int signal_number = sigsetjmp(crashed, 1);
    if (signal_number == 0) run_grid(grid, group);
    else say("stopped by signal %d: an access that hit a guard page, or a stack that overflowed", signal_number);
    running = 0, current = nullptr;
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &kept[i], nullptr);
    for (uint i = 0; i < count; ++i) {
        all[i].num_unwritten = 0;
        for (uint64_t at = 0; all[i].writable && at < all[i].num_bytes; ++at)
            all[i].num_unwritten += owners[i][at] ? 0 : 1;
        free(owners[i]);
    }
    free(owners);
    return failed ? -1 : int(arena_payload);
}

// ---- hooks that the compiler calls (names and signatures are those of compiler-rt) ----
#define HOOKS(N)                                                                              \
    extern "C" void __tsan_read##N(void* at) { touch(at, N, false); }                         \
    extern "C" void __tsan_write##N(void* at) { touch(at, N, true); }                         \
    extern "C" void __tsan_unaligned_read##N(void* at) { touch(at, N, false); }               \
    extern "C" void __tsan_unaligned_write##N(void* at) { touch(at, N, true); }               \
    extern "C" void __tsan_read_write##N(void* at) { touch(at, N, false), touch(at, N, true); } \
    extern "C" void __tsan_unaligned_read_write##N(void* at) { touch(at, N, false), touch(at, N, true); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void* __tsan_memset(void* at, int value, size_t n) { return touch(at, uint(n), true), memset(at, value, n); }
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
    return touch(from, uint(n), false), touch(to, uint(n), true), memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t n) {
    return touch(from, uint(n), false), touch(to, uint(n), true), memmove(to, from, n);
}

struct Place { const char* file; uint line, column; };
#define UNDEFINED(NAME, WHAT)                                                                                  \
    extern "C" void __ubsan_handle_##NAME(Place* place, void*, void*) {                                       \
        say("line %u: " WHAT, place->line), fail_if_said();                                                   \
    }
UNDEFINED(out_of_bounds, "an index past the end of an array")
UNDEFINED(shift_out_of_bounds, "a shift by the width of the type or more")
UNDEFINED(add_overflow, "a signed sum overflows")
UNDEFINED(sub_overflow, "a signed difference overflows")
UNDEFINED(mul_overflow, "a signed product overflows")
UNDEFINED(divrem_overflow, "a division by zero")
UNDEFINED(float_cast_overflow, "a float does not fit the integer it is cast to")
