// Fibers and their schedule, warp operations, barriers, and the launch.
#include "state.h"

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <ucontext.h>

namespace emulator {

Index thread_index, block_index, block_size, grid_size;
const Launch* launch;
Thread* current;
std::vector<Thread> threads;

static jmp_buf launch_start;
static void* scheduler[5];
static ucontext_t first_context;
static std::vector<unsigned> lane_order, warp_order;
static unsigned arrived, first_arrived;  // at the barrier of the block

unsigned lane() { return current->lane; }

unsigned block_number() {
    return (block_index.z * grid_size.y + block_index.y) * grid_size.x + block_index.x;
}

// Errors ------------------------------------------------------------------------------------------

void describe(const char* format, ...) {
    size_t used = strlen(launch->report);
    va_list list;
    va_start(list, format);
    vsnprintf(launch->report + used, launch->report_size - used, format, list);
    va_end(list);
}

const char* text(Site site, char (&buffer)[256]) {
    if (site.file) {
        const char* slash = strrchr(site.file, '/');
        snprintf(buffer, 256, "%s:%d", slash ? slash + 1 : site.file, site.line);
    } else {  // one byte back: the call, not the next instruction
        snprintf(buffer, 256, "@0x%zx", size_t((const char*)site.address - library().begin - 1));
    }
    return buffer;
}

void abandon() {
    current = nullptr;
    for (Thread& thread : threads) thread.started = false;
    _longjmp(launch_start, 1);
}

void fail(Site site, const char* format, ...) {
    char message[1024], buffer[256];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    describe("%s, at %s", message, text(site, buffer));
    describe(", block (%u, %u, %u)", block_index.x, block_index.y, block_index.z);
    if (current) {
        Index i = current->index;
        describe(", thread (%u, %u, %u)", i.x, i.y, i.z);
    }
    abandon();
}

// The next kernel would not be ordered after the previous ones.
[[noreturn]] static void fail_unordered() {
    Index i = current->index;
    describe("a thread ended without wait_for_previous, block (%u, %u, %u), thread (%u, %u, %u)",
             block_index.x, block_index.y, block_index.z, i.x, i.y, i.z);
    abandon();
}

// Fibers ------------------------------------------------------------------------------------------

// g++ must neither see that `jump` does not return, or it removes what follows __builtin_setjmp, nor what
// `pause_fiber` does: other fibers write to memory meanwhile.
__attribute__((noipa)) static void jump(void** context) { __builtin_longjmp(context, 1); }

// Continues the scheduler, until it runs this fiber again.
__attribute__((noipa)) static void pause_fiber() {
    if (!__builtin_setjmp(current->context)) jump(scheduler);
}

static void fiber() {
    for (;;) {
        launch->body(launch->arguments);
        if (launch->dependent && !current->has_waited) fail_unordered();
        current->state = State::RETURNED;
        pause_fiber();
    }
}

__attribute__((noipa)) static void run(Thread& thread) {
    current = &thread;
    thread_index = thread.index;
    if (!__builtin_setjmp(scheduler)) {
        if (thread.started) jump(thread.context);
        thread.started = true;
        first_context.uc_stack.ss_sp = stack_of(thread.linear);
        first_context.uc_stack.ss_size = STACK;
        makecontext(&first_context, fiber, 0);
        setcontext(&first_context);
    }
    current = nullptr;
}

static void wait_in(State state) {
    current->state = state;
    stop_if_interrupted(current->site);
    pause_fiber();
}

// Schedule ----------------------------------------------------------------------------------------

// The lanes that wait in one operation of a warp: a lane that joins them need not compare itself with each.
struct Gathering {
    unsigned lanes;       // 0: none
    const Thread* first;  // the thread of one of them
    void* operands[WARP];
};
static Gathering gatherings[MAX_WARPS];

// Sets `order` to 0, 1, ..., size - 1 in the order of the launch.
static void set_order(std::vector<unsigned>& order, size_t size, unsigned salt) {
    order.resize(size);
    std::iota(order.begin(), order.end(), 0u);
    if (launch->order < 0) std::reverse(order.begin(), order.end());
    if (launch->order > 0) {
        std::mt19937 generator(launch->order * 7919u + salt);
        std::shuffle(order.begin(), order.end(), generator);
    }
}

// Runs the lanes of a warp until all wait or have returned. Returns whether any lane ran.
static bool run_warp(unsigned warp) {
    bool progress = false;
    for (unsigned lane : lane_order) {
        unsigned linear = warp * WARP + lane;
        if (linear < threads.size() && threads[linear].state == State::READY) {
            run(threads[linear]);
            progress = true;
        }
    }
    return progress;
}

static void report_deadlock() {
    char buffer[256];
    std::vector<std::pair<std::string, std::vector<unsigned>>> groups;
    for (Thread& thread : threads) {
        std::string what = "returned";
        if (thread.state != State::RETURNED)
            what = std::string("in ") + thread.operation + " at " + text(thread.site, buffer);
        auto same = [&](auto& group) { return group.first == what; };
        auto group = std::find_if(groups.begin(), groups.end(), same);
        if (group == groups.end()) group = groups.insert(group, {what, {}});
        group->second.push_back(thread.linear);
    }
    describe("deadlock in block (%u, %u, %u):", block_index.x, block_index.y, block_index.z);
    const char* between = "";
    for (auto& [what, members] : groups) {
        describe("%s %zu thread%s (", between, members.size(), members.size() == 1 ? "" : "s");
        between = ";";
        for (size_t i = 0; i < members.size() && i < 4; i++) describe(i ? ", %u" : "%u", members[i]);
        describe("%s) %s", members.size() > 4 ? ", ..." : "", what.c_str());
    }
    abandon();
}

static void run_block() {
    poison();
    watch_block();
    arrived = 0;
    if (checking) check_block();
    warpgroup_block();
    for (Gathering& gathering : gatherings) gathering.lanes = 0;
    for (Thread& thread : threads) {
        thread.state = State::READY;
        thread.copies.clear();
        thread.group = 0;
        thread.has_waited = false;
    }
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned warp : warp_order) {
            while (run_warp(warp)) progress = true;
        }
    }
    for (Thread& thread : threads) {
        if (thread.state != State::RETURNED) report_deadlock();
    }
    warpgroup_block_end();
}

static void prepare() {
    grid_size = launch->grid;
    block_size = launch->block;
    checking = launch->checking;
    unsigned size = block_size.x * block_size.y * block_size.z;
    map_memory(size, launch->dynamic_shared);
    getcontext(&first_context);
    threads.resize(size);
    for (unsigned i = 0; i < size; i++) {
        Thread& thread = threads[i];
        thread.index = {i % block_size.x, i / block_size.x % block_size.y,
                        i / block_size.x / block_size.y};
        thread.linear = i;
        thread.warp = i / WARP;
        thread.lane = i % WARP;
    }
    set_order(lane_order, WARP, 1);
    set_order(warp_order, (size + WARP - 1) / WARP, 2);
}

// Warp operations and barriers ----------------------------------------------------------------------

// Adds `self`, unless the gathered lanes wait in another operation, as of another part of the warp.
static bool gather(Gathering& gathering, const Thread& self) {
    if (!gathering.lanes) gathering = {0, &self, {}};
    if (!self.joins(*gathering.first)) return false;
    gathering.lanes |= 1u << self.lane;
    gathering.operands[self.lane] = self.operands;
    return true;
}

static void complete(Gathering& gathering, const Thread& last, void** operands) {
    last.evaluate(operands, last.site);
    gathering.lanes &= ~last.mask;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (last.mask >> lane & 1) threads[last.warp * WARP + lane].state = State::READY;
    }
}

void warp_operation(
    Evaluate evaluate, const char* name, unsigned mask, void* operands, Site site) {
    Thread& self = *current;
    unsigned first = self.warp * WARP;
    char buffer[256];
    if (!(mask >> self.lane & 1)) fail(site, "the mask of %s does not include the calling lane", name);
    self.evaluate = evaluate;
    self.operation = name;
    self.mask = mask;
    self.operands = operands;
    self.site = site;
    Gathering& gathering = gatherings[self.warp];
    if (gather(gathering, self)) {
        if (gathering.lanes == mask) return complete(gathering, self, gathering.operands);
        unsigned next = first + __builtin_ctz(mask & ~gathering.lanes);
        bool runs = next < threads.size() && threads[next].state == State::READY;
        if (runs) return wait_in(State::IN_WARP);
    }
    void* all[WARP] = {};
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(mask >> lane & 1)) continue;
        unsigned linear = first + lane;
        if (linear >= threads.size())
            fail(site, "the mask of %s includes lane %u, which does not exist", name, lane);
        Thread& other = threads[linear];
        if (other.state == State::RETURNED)
            fail(site, "the mask of %s includes lane %u, which has returned", name, lane);
        if (lane != self.lane && other.state == State::READY) return wait_in(State::IN_WARP);
        if (other.state == State::IN_BLOCK)
            fail(site, "the mask of %s includes lane %u, which waits in %s at %s", name, lane,
                 other.operation, text(other.site, buffer));
        if (!self.joins(other))
            fail(site, "%s with mask 0x%x, but lane %u is in %s with mask 0x%x at %s", name, mask,
                 lane, other.operation, other.mask, text(other.site, buffer));
        all[lane] = other.operands;
    }
    complete(gathering, self, all);
}

static void join_lanes(void**, Site) {
    if (checking) check_sync_warp(current->warp * WARP, current->mask);
}

void sync_warp(unsigned mask, Site site) {
    warp_operation(join_lanes, "__syncwarp", mask, nullptr, site);
}

int sync_block(Vote vote, int predicate, const char* name, Site site) {
    Thread& self = *current;
    char buffer[256];
    if (arrived) {
        Thread& other = threads[first_arrived];
        if (other.site.line != site.line || other.operation != name)
            fail(site, "divergent %s: thread %u waits in %s at %s", name, other.linear,
                 other.operation, text(other.site, buffer));
    } else {
        first_arrived = self.linear;
    }
    self.operation = name;
    self.site = site;
    self.predicate = predicate;
    if (++arrived < threads.size()) {
        wait_in(State::IN_BLOCK);
        return self.predicate;
    }
    arrived = 0;
    int count = 0;
    for (Thread& other : threads) count += other.predicate != 0;
    int result = vote == COUNT ? count : vote == ANY ? count > 0 : count == int(threads.size());
    for (Thread& other : threads) {
        other.predicate = result;
        other.state = State::READY;
    }
    if (checking) check_barrier();
    return result;
}

void fence() {
    if (checking) check_fence();
}

void wait_for_previous() { current->has_waited = true; }

void prefetch(const void* address, Site site) { touch(address, 1, site); }

void fence_proxy_async() {
    if (checking) check_proxy_fence();
}

// cp.async ----------------------------------------------------------------------------------------

constexpr unsigned char PENDING = 0xFF;  // each byte of a destination until the copy arrives

void copy_async(void* to, const void* from, size_t size, size_t source_size, Site site) {
    if (uintptr_t(to) % size || (source_size && uintptr_t(from) % size))
        fail(site, "cp.async with an address that is not aligned to %zu bytes", size);
    if (!in_shared((char*)to)) fail(site, "cp.async to an address outside shared memory");
    if (source_size) check_read(from, source_size, site);
    if (checking) check_in_flight(to, size, site);
    memset(to, PENDING, size);
    AsyncCopy copy{to, from, size, source_size, current->group, site, {}};
    memcpy(copy.value, from, source_size);
    current->copies.push_back(copy);
}

// Completes a copy. On a GPU it reads and writes at any time between issue and wait, so that neither
// source nor destination may have changed.
static void arrive(const AsyncCopy& copy) {
    auto is_pending = [](unsigned char byte) { return byte == PENDING; };
    auto* to = static_cast<unsigned char*>(copy.to);
    if (memcmp(copy.value, copy.from, copy.source_size))
        fail(copy.site, "the source of cp.async was written to before cp_async_wait");
    if (!std::all_of(to, to + copy.size, is_pending))
        fail(copy.site, "the destination of cp.async was written to before cp_async_wait");
    memcpy(to, copy.value, copy.source_size);
    memset(to + copy.source_size, 0, copy.size - copy.source_size);
    if (checking) check_arrival(to, copy.size, copy.site);
}

void copy_async_commit() { current->group++; }

void copy_async_wait(int pending_groups) {
    Thread& self = *current;
    size_t arrived = 0;
    for (AsyncCopy& copy : self.copies) {
        if (copy.group >= self.group - pending_groups) break;
        arrive(copy);
        arrived++;
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + arrived);
}

}  // namespace emulator

using namespace emulator;

// Runs a kernel. Returns 0 on success; otherwise `report` describes the error.
extern "C" __attribute__((visibility("default"))) int emulator_launch(const Launch* given) {
    launch = given;
    volatile int failed = 1;
    catch_faults();
    if (!_setjmp(launch_start)) {
        prepare();
        start_timer();
        if (checking) check_launch();
        std::vector<unsigned> blocks;
        set_order(blocks, size_t(grid_size.x) * grid_size.y * grid_size.z, 3);
        for (unsigned block : blocks) {
            block_index = {block % grid_size.x, block / grid_size.x % grid_size.y,
                           block / grid_size.x / grid_size.y};
            run_block();
        }
        failed = 0;
    }
    stop_timer();
    if (given->checking) check_launch_end();
    release_faults();
    launch = nullptr;
    return failed;
}
