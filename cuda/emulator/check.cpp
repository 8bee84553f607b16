// Check mode, which records the thread of every memory access of the kernel. GCC instruments the kernel
// as for ThreadSanitizer and UndefinedBehaviorSanitizer; their run-time functions are defined here.
//
// Two accesses to a byte, at least one of them a write and not both atomic, are a race unless they are
// ordered: by a barrier of the block; by __syncwarp; or, between blocks, by a __threadfence and then an
// atomic in one block, followed by an atomic on the same address in the other. Only the last writer and
// the last reader of a byte are recorded, so a kernel should be checked both forward and in reverse.
#include "state.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <sys/mman.h>

namespace emulator {

bool checking;

// The number of block barriers so far in the upper bits; in the lower 32 bits a thread's clock, the number
// of its warp barriers and fences since the last one.
using Stamp = uint64_t;

// An access to a byte: its thread, place and time. All bits 0: none.
struct Access {
    Stamp stamp;
    uint32_t bits;
    uint32_t at;  // offset into the library
    explicit operator bool() const { return bits & 1; }
    bool atomic() const { return bits & 2; }
    bool in_flight() const { return bits & 4; }
    unsigned thread() const { return bits >> 3 & 0x3FF; }
    unsigned block() const { return bits >> 13; }
};
constexpr unsigned VALID = 1, ATOMIC = 2, IN_FLIGHT = 4;

struct Byte {
    Access write, read;
};

struct Shadow {
    Region region;
    Byte* bytes;
    bool shared;
};

using Stamps = std::shared_ptr<std::vector<Stamp>>;  // for each thread, up to which stamp it is ordered
using Known = std::map<unsigned, Stamps>;            // the stamps of each block

static std::vector<Shadow> shadows;
static Stamp epoch;
static std::vector<uint32_t> clock_of;
static std::vector<uint32_t> seen;  // [thread][lane]: clock of the lane at the last common __syncwarp
static std::vector<Stamp> fenced;   // [thread]: its stamp at its last fence
static std::vector<uint32_t> seen_when_fenced;  // [thread][lane]: `seen` at the thread's last fence
static std::vector<Stamp> proxy_fenced;         // [thread]: its stamp at its last fence.proxy.async
static std::vector<Stamp> proxy_fenced_at_barrier;  // `proxy_fenced` at the last barrier of the block
static Known acquired;                              // by the running block
static std::map<const void*, Known> released;       // by atomics, for each address

static Stamp stamp_of(unsigned thread) { return epoch << 32 | clock_of[thread]; }
static Stamp epoch_in(Stamp stamp) { return stamp >> 32; }
static uint32_t clock_in(Stamp stamp) { return uint32_t(stamp); }

// Launch and block --------------------------------------------------------------------------------

static void add_shadow(Region region, bool shared) {
    if (region.end <= region.begin) return;
    size_t size = (region.end - region.begin) * sizeof(Byte);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (bytes == MAP_FAILED) fail(here(nullptr), "no memory to check argument %d", region.argument);
    shadows.push_back({region, static_cast<Byte*>(bytes), shared});
}

void check_launch() {
    std::vector<Region> regions(launch->regions, launch->regions + launch->num_regions);
    auto earlier = [](const Region& a, const Region& b) { return a.begin < b.begin; };
    std::sort(regions.begin(), regions.end(), earlier);
    std::vector<Region> merged;
    for (const Region& region : regions) {  // overlapping regions, as of a tensor and its view, are one
        if (!merged.empty() && region.begin < merged.back().end) {
            merged.back().end = std::max(merged.back().end, region.end);
        } else {
            merged.push_back(region);
        }
    }
    for (const Region& region : merged) add_shadow(region, false);
    add_shadow({static_shared().begin, static_shared().end, -1}, true);
    Span span = dynamic_span();
    add_shadow({span.begin, span.end, -1}, true);
    released.clear();
}

void check_launch_end() {
    for (Shadow& shadow : shadows) {
        munmap(shadow.bytes, (shadow.region.end - shadow.region.begin) * sizeof(Byte));
    }
    shadows.clear();
}

void check_block() {
    acquired.clear();
    epoch = 0;
    size_t size = threads.size();
    clock_of.assign(size, 1);
    seen.assign(size * WARP, 0);
    fenced.assign(size, 0);
    seen_when_fenced.assign(size * WARP, 0);
    proxy_fenced.assign(size, 0);
    proxy_fenced_at_barrier.assign(size, 0);
}

// Order of accesses -------------------------------------------------------------------------------

void check_barrier() {
    epoch++;
    proxy_fenced_at_barrier = proxy_fenced;
    std::fill(clock_of.begin(), clock_of.end(), 1);
    std::fill(seen.begin(), seen.end(), 0);
}

void check_sync_warp(unsigned first, unsigned mask) {
    uint32_t joined[WARP] = {};
    for (int lane = 0; lane < WARP; lane++) {
        if (!(mask >> lane & 1)) continue;
        for (int other = 0; other < WARP; other++)
            joined[other] = std::max(joined[other], seen[(first + lane) * WARP + other]);
        joined[lane] = clock_of[first + lane]++;
    }
    for (int lane = 0; lane < WARP; lane++) {
        if (mask >> lane & 1) std::copy_n(joined, WARP, &seen[(first + lane) * WARP]);
    }
}

void check_fence() {
    unsigned thread = current->linear;
    fenced[thread] = stamp_of(thread);
    std::copy_n(&seen[thread * WARP], WARP, &seen_when_fenced[thread * WARP]);
    clock_of[thread]++;
}

void check_proxy_fence() {
    unsigned thread = current->linear;
    proxy_fenced[thread] = stamp_of(thread);
    clock_of[thread]++;
}

// Returns the stamp up to which the accesses of `thread` are released when `self`, a thread of the same
// block, executes an atomic.
static Stamp released_stamp(unsigned thread, unsigned self) {
    if (thread == self) return fenced[self];
    bool same_warp = thread / WARP == self / WARP;
    unsigned pair = self * WARP + thread % WARP;
    Stamp stamp = 0;
    if (Stamp at = fenced[self]) {  // ordered before the fence of `self`
        Stamp base = epoch_in(at) << 32;
        stamp = same_warp ? base | seen_when_fenced[pair] : base ? base - 1 : 0;
    }
    Stamp own = fenced[thread];  // or fenced by itself, and ordered before the atomic
    bool ordered = epoch_in(own) < epoch || (same_warp && clock_in(own) <= seen[pair]);
    return ordered ? std::max(stamp, own) : stamp;
}

static void merge(Known& into, unsigned block, const Stamps& stamps) {
    Stamps& known = into[block];
    if (!known || known == stamps) {
        known = stamps;
        return;
    }
    auto joined = std::make_shared<std::vector<Stamp>>(*known);
    for (size_t i = 0; i < joined->size(); i++) (*joined)[i] = std::max((*joined)[i], (*stamps)[i]);
    known = joined;
}

static void synchronize(const void* address) {
    Known& here = released[address];
    for (auto& [block, stamps] : here) merge(acquired, block, stamps);
    auto mine = std::make_shared<std::vector<Stamp>>(threads.size());
    for (size_t i = 0; i < threads.size(); i++) (*mine)[i] = released_stamp(i, current->linear);
    for (auto& [block, stamps] : acquired) merge(here, block, stamps);
    merge(here, block_number(), mine);
}

static bool ordered(Access before) {
    unsigned thread = before.thread(), self = current->linear;
    if (before.block() != (block_number() & 0x7FFFF)) {
        auto known = acquired.find(before.block());
        return known != acquired.end() && before.stamp <= (*known->second)[thread];
    }
    if (thread == self || epoch_in(before.stamp) < epoch) return true;
    bool same_warp = thread / WARP == self / WARP;
    return same_warp && clock_in(before.stamp) <= seen[self * WARP + thread % WARP];
}

// Accesses ----------------------------------------------------------------------------------------

static void fail_race(
    Site site, const char* now, const char* then, Access before, const Shadow& in) {
    char buffer[256], where[64] = "shared memory";
    if (!in.shared) snprintf(where, sizeof where, "argument %d", in.region.argument);
    Site at_then = here(library().begin + before.at);
    fail(site, "race on %s: a %s by thread %u of block %u at %s is not ordered before a %s", where, then,
         before.thread(), before.block(), text(at_then, buffer), now);
}

static Shadow* find(char* address) {
    static size_t last;  // most accesses are to the same array as the previous one
    auto inside = [&](size_t i) {
        return address >= shadows[i].region.begin && address < shadows[i].region.end;
    };
    if (last < shadows.size() && inside(last)) return &shadows[last];
    for (last = 0; last < shadows.size(); last++) {
        if (inside(last)) return &shadows[last];
    }
    return nullptr;
}

static void unknown(char* address, size_t size, bool is_write, Site site) {
    if (in_stacks(address)) check_registers(address, size, is_write, site);
    if (launch->closed && !in_stacks(address) && !in_library(address)) fail_outside(address, site);
}

static uint32_t offset(Site site) {
    return site.address ? uint32_t((char*)site.address - library().begin) : 0;
}

enum Kind { READ = 1, WRITE = 2, BOTH = 3, ARRIVAL = 4 | WRITE };

static void access(void* pointer, size_t size, Kind kind, unsigned flags, Site site) {
    char* address = static_cast<char*>(pointer);
    if (!checking || !current) return;
    stop_if_interrupted(site);
    Shadow* shadow = find(address);
    if (!shadow) return unknown(address, size, kind & WRITE, site);
    const Region& region = shadow->region;
    if (address + size > region.end) fail_outside(region.end, site);
    if (launch->dependent && !shadow->shared && !current->has_waited)
        fail(site, "argument %d is used before wait_for_previous", region.argument);
    unsigned block = block_number() & 0x7FFFF;
    uint32_t bits = block << 13 | current->linear << 3 | flags | VALID;
    Access self{stamp_of(current->linear), bits, offset(site)};
    for (size_t i = 0; i < size; i++) {
        Byte& byte = shadow->bytes[address - region.begin + i];
        Access write = byte.write, read = byte.read;
        if (shadow->shared) {  // accesses of other blocks were to their own shared memory
            if (write && write.block() != block) write = {};
            if (read && read.block() != block) read = {};
            if (kind & READ && !write) fail(site, "read of uninitialized shared memory");
        }
        if (kind & READ && write.in_flight())
            fail(site, "read of the destination of a cp.async before cp_async_wait");
        if (kind & WRITE && kind != ARRIVAL && write.in_flight())
            fail(site, "write to the destination of a cp.async before cp_async_wait");
        bool excused = self.atomic() && write.atomic();
        if (write && !excused && !ordered(write))
            fail_race(site, kind & WRITE ? "write" : "read", "write", write, *shadow);
        excused = self.atomic() && read.atomic();
        if (kind & WRITE && read && !excused && !ordered(read))
            fail_race(site, "write", "read", read, *shadow);
        if (kind & READ) byte.read = self;
        if (kind & WRITE) byte.write = self;
    }
}

void check_read(const void* address, size_t size, Site site) {
    touch(address, size, site);
    access(const_cast<void*>(address), size, READ, 0, site);
}

void check_write(void* address, size_t size, Site site) {
    touch(address, size, site);
    access(address, size, WRITE, 0, site);
}

void check_atomic(void* address, size_t size, Site site) {
    touch(address, size, site);
    access(address, size, BOTH, ATOMIC, site);
    if (checking && !in_shared(static_cast<char*>(address))) synchronize(address);
}

void check_in_flight(void* address, size_t size, Site site) {
    access(address, size, WRITE, IN_FLIGHT, site);
}

void check_arrival(void* address, size_t size, Site site) {
    access(address, size, ARRIVAL, 0, site);
}

// Tensor cores read this memory: after a write there must be a fence.proxy.async of the writer, and then a
// barrier.
void check_proxy(char* address, size_t size, Site site) {
    char buffer[256];
    Shadow* shadow = find(address);
    for (size_t i = 0; shadow && i < size; i++) {
        Access write = shadow->bytes[address - shadow->region.begin + i].write;
        unsigned thread = write.thread();
        const std::vector<Stamp>& fences =
            thread == current->linear ? proxy_fenced : proxy_fenced_at_barrier;
        if (write.stamp > fences[thread])
            fail(site, "wgmma reads what thread %u wrote at %s without fence_proxy_async after it", thread,
                 text(here(library().begin + write.at), buffer));
    }
}

static void aligned(void* address, size_t size, Site site) {
    if (uintptr_t(address) % size && current)
        fail(site, "access of %zu bytes at an address that is not aligned to %zu", size, size);
}

}  // namespace emulator

// The functions that instrumented code calls --------------------------------------------------------

using namespace emulator;

#define ACCESS(NAME, SIZE, KIND) \
    extern "C" void __tsan_##NAME##SIZE(void* address) { \
        aligned(address, SIZE, EMULATOR_RETURN); \
        access(address, SIZE, KIND, 0, EMULATOR_RETURN); \
    }
#define UNALIGNED(NAME, SIZE, KIND) \
    extern "C" void __tsan_unaligned_##NAME##SIZE(void* address) { \
        access(address, SIZE, KIND, 0, EMULATOR_RETURN); \
    }
ACCESS(read, 1, READ) ACCESS(read, 2, READ) ACCESS(read, 4, READ) ACCESS(read, 8, READ)
ACCESS(read, 16, READ) ACCESS(write, 1, WRITE) ACCESS(write, 2, WRITE) ACCESS(write, 4, WRITE)
ACCESS(write, 8, WRITE) ACCESS(write, 16, WRITE)
UNALIGNED(read, 2, READ) UNALIGNED(read, 4, READ) UNALIGNED(read, 8, READ)
UNALIGNED(read, 16, READ) UNALIGNED(write, 2, WRITE) UNALIGNED(write, 4, WRITE)
UNALIGNED(write, 8, WRITE) UNALIGNED(write, 16, WRITE)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* address, size_t size) {
    access(address, size, READ, 0, EMULATOR_RETURN);
}
void __tsan_write_range(void* address, size_t size) {
    access(address, size, WRITE, 0, EMULATOR_RETURN);
}

struct UbsanSite {
    const char* file;
    uint32_t line, column;
};
void __ubsan_handle_type_mismatch_v1_abort(UbsanSite* site, uintptr_t pointer) {
    Site at = here(site->file, site->line);
    if (!current) return;
    if (!pointer) fail(at, "access through a null pointer");
    fail(at, "misaligned access: the address ends in 0x%02x", unsigned(pointer & 0xFF));
}
void __ubsan_handle_shift_out_of_bounds_abort(UbsanSite* site, uintptr_t, uintptr_t count) {
    fail(here(site->file, site->line), "shift by %d bits", int(count));
}
void __ubsan_handle_float_cast_overflow_abort(void*, uintptr_t) {
    fail(EMULATOR_RETURN, "conversion of a float that does not fit the integer type");
}
void __ubsan_handle_out_of_bounds_abort(UbsanSite* site, uintptr_t index) {
    fail(here(site->file, site->line), "array index %td out of bounds", intptr_t(index));
}
}
