// Warpgroup matmuls (wgmma). Each of the four warps computes its own 16 rows, so the warps may be as far
// apart as the kernel allows; all four must issue the same instructions.
//
// A matmul is computed when its warp waits for it. Until then its result registers hold NaN, and its operands
// must not change.
#include "state.h"

#include <cstring>

namespace emulator {

constexpr int ROWS = 16, DEPTH = 16, WARPS = 4;

using Elements = std::vector<uint16_t>;  // [rows, DEPTH]

struct Registers {  // one array of each lane of a warp
    char* of[WARP];
    size_t size;
    int pending;              // the number of pending matmuls that use them
    std::vector<float> sums;  // [lane, size / 4]: their values after the wait
};

struct Pending {
    Matmul matmul;  // the operands of lane 0
    int group;
    Site site;
    size_t d, registers;  // indices in WarpMatmuls::registers
    Elements a, b;
};

struct WarpMatmuls {
    bool fenced;
    int group;
    std::vector<Registers> registers;
    std::vector<Pending> pending;
    size_t issued;  // the number of instructions
};

struct Instruction {
    const char* name;
    Site site;
    uint64_t a, b;
};

static std::vector<WarpMatmuls> warps;
static std::vector<std::vector<Instruction>> instructions;  // instructions of each warpgroup
static bool any;                                            // whether this block issued any

void warpgroup_block() {
    any = false;
    size_t size = (threads.size() + WARP - 1) / WARP;
    warps.assign(size, {});
    instructions.assign((size + WARPS - 1) / WARPS, {});
}

void warpgroup_block_end() {
    for (size_t i = 0; any && i < warps.size(); i++) {
        std::vector<Instruction>& all = instructions[i / WARPS];
        if (!warps[i].pending.empty())
            fail(warps[i].pending[0].site, "wgmma without warpgroup_wait in warp %zu", i);
        size_t issued = warps[i].issued;
        if (issued < all.size())
            fail(all[issued].site, "%s of a warpgroup was not issued by its warp %zu",
                 all[issued].name, i);
    }
}

// Records that the current warp issues an instruction; the four warps must issue the same ones.
static WarpMatmuls& issue(const char* name, Site site, uint64_t a = 0, uint64_t b = 0) {
    char buffer[256];
    if (threads.size() % (WARP * WARPS))
        fail(site, "%s in a block of %zu threads, not a multiple of 128", name, threads.size());
    any = true;
    WarpMatmuls& own = warps[current->warp];
    std::vector<Instruction>& all = instructions[current->warp / WARPS];
    if (own.issued == all.size()) all.push_back({name, site, a, b});
    const Instruction& other = all[own.issued++];
    if (other.site.address != site.address)
        fail(site, "%s, but another warp of the warpgroup issued %s at %s", name, other.name,
             text(other.site, buffer));
    if (other.a != a || other.b != b)
        fail(site, "%s with descriptors that differ between warps of the warpgroup", name);
    return own;
}

// Matrices in shared memory -------------------------------------------------------------------------

struct Descriptor {
    unsigned start, leading, stride;  // bytes

    Descriptor(uint64_t bits, Site site)
        : start(bits << 4 & 0x3FFF0), leading(bits >> 12 & 0x3FFF0), stride(bits >> 28 & 0x3FFF0) {
        if (bits & 0x3FF1C000C000C000) fail(site, "wgmma descriptor with reserved bits set");
        if (bits >> 62 != 1) fail(site, "wgmma descriptor without 128-byte swizzle: not emulated");
        if (bits >> 49 & 7 || start & 0x380)
            fail(site, "wgmma descriptor of a pattern that is not aligned to 1024 bytes: not emulated");
    }
};

// Reads the 8 elements at an address, to which the swizzle is applied here.
static void read_vector(uint16_t (&to)[8], unsigned address, Site site) {
    address ^= (address >> 7 & 7) << 4;
    char* from = shared_window() + (address & 0x3FFFF);
    if (!in_shared(from)) fail(site, "wgmma of an address outside dynamic shared memory");
    read_memory(to, from, sizeof to, site);
    if (checking) check_proxy(from, sizeof to, site);
}

// Reads `rows` rows of a matrix [.., DEPTH], starting at row `first` (K-major) or at 0 (MN-major). K-major:
// the elements of a row are contiguous; MN-major: those of a column.
static Elements read_matrix(Descriptor from, bool mn_major, int first, int rows, Site site) {
    Elements elements(rows * DEPTH);
    uint16_t vector[8];
    for (int i = 0; i < rows * DEPTH / 8; i++) {
        if (mn_major) {
            int k = i % DEPTH, n = i / DEPTH * 8;
            unsigned at = n / 64 * from.leading + n % 64 * 2 + k / 8 * from.stride + k % 8 * 128;
            read_vector(vector, from.start + at, site);
            for (int j = 0; j < 8; j++) elements[(n + j) * DEPTH + k] = vector[j];
        } else {
            int row = first + i / 2;
            read_vector(vector, from.start + row / 8 * from.stride + row % 8 * 128 + i % 2 * 16, site);
            memcpy(&elements[i * 8], vector, sizeof vector);
        }
    }
    return elements;
}

static Elements read_left(const WarpMatmuls& own, const Pending& it) {
    if (!it.matmul.registers)
        return read_matrix({it.matmul.a, it.site}, false, current->warp % WARPS * ROWS, ROWS, it.site);
    Elements elements(ROWS * DEPTH);
    for (int lane = 0; lane < WARP; lane++) {
        unsigned registers[4];
        memcpy(registers, own.registers[it.registers].of[lane], sizeof registers);
        for (int i = 0; i < 8; i++) {
            int row = lane / 4 + i / 2 % 2 * 8, column = lane % 4 * 2 + i / 4 * 8 + i % 2;
            elements[row * DEPTH + column] = registers[i / 2] >> i % 2 * 16;
        }
    }
    return elements;
}

static Elements read_right(const Pending& it) {
    return read_matrix({it.matmul.b, it.site}, it.matmul.transposed, 0, it.matmul.columns, it.site);
}

// Matmuls -------------------------------------------------------------------------------------------

// Returns the index of the registers that are at `first` in lane 0; adds them if they are new.
static size_t find(WarpMatmuls& own, const void* first, size_t size, Site site) {
    for (size_t i = 0; i < own.registers.size(); i++) {
        Registers& known = own.registers[i];
        if (known.of[0] != first) continue;
        if (known.pending && known.size != size)
            fail(site, "wgmma with registers of another wgmma, before warpgroup_wait");
        known.size = size;
        return i;
    }
    own.registers.push_back({{}, size, 0, {}});
    return own.registers.size() - 1;
}

static void begin(void** operands, Site site) {
    const Matmul& first = *static_cast<Matmul*>(operands[0]);
    WarpMatmuls& own = issue("wgmma", site, first.a, first.b);
    if (!own.fenced)
        fail(site, "wgmma without a warpgroup_fence since its registers were accessed or waited for");
    size_t size = first.columns / 2 * sizeof(float);
    Pending it{first, own.group, site, find(own, first.d, size, site), 0, {}, {}};
    if (first.registers) it.registers = find(own, first.registers, 4 * sizeof(unsigned), site);
    Registers& d = own.registers[it.d];
    bool is_new = d.pending++ == 0;
    if (first.registers) own.registers[it.registers].pending++;
    if (is_new) d.sums.resize(WARP * size / sizeof(float));
    for (int lane = 0; lane < WARP; lane++) {
        const Matmul& matmul = *static_cast<Matmul*>(operands[lane]);
        if (matmul.a != first.a || matmul.b != first.b || matmul.adds != first.adds)
            fail(site, "wgmma with operands that differ between lanes");
        if (first.registers) own.registers[it.registers].of[lane] = (char*)matmul.registers;
        if (!is_new) continue;
        d.of[lane] = (char*)matmul.d;
        memcpy(&d.sums[lane * size / sizeof(float)], d.of[lane], size);
        memset(d.of[lane], 0xFF, size);
    }
    it.a = read_left(own, it);
    it.b = read_right(it);
    own.pending.push_back(std::move(it));
}

static void multiply(Registers& d, const Pending& it) {
    const Matmul& matmul = it.matmul;
    std::vector<float> a(it.a.size()), b(it.b.size());
    for (size_t i = 0; i < a.size(); i++) a[i] = matmul.widen(it.a[i]);
    for (size_t i = 0; i < b.size(); i++) b[i] = matmul.widen(it.b[i]);
    for (int lane = 0; lane < WARP; lane++) {
        float* sums = &d.sums[lane * matmul.columns / 2];
        for (int i = 0; i < matmul.columns / 2; i++) {
            const float* row = &a[(lane / 4 + i / 2 % 2 * 8) * DEPTH];
            const float* column = &b[(i / 4 * 8 + lane % 4 * 2 + i % 2) * DEPTH];
            float sum = 0;
            for (int k = 0; k < DEPTH; k++) sum += row[k] * column[k];
            sums[i] = (matmul.adds ? sums[i] : 0) + sum;
        }
    }
}

static void finish(WarpMatmuls& own, const Pending& it) {
    if (read_left(own, it) != it.a || read_right(it) != it.b)
        fail(it.site, "the operands of wgmma were changed before warpgroup_wait");
    Registers& d = own.registers[it.d];
    multiply(d, it);
    if (it.matmul.registers) own.registers[it.registers].pending--;
    if (--d.pending) return;
    for (int lane = 0; lane < WARP; lane++) {
        for (size_t i = 0; i < d.size; i++) {
            if (d.of[lane][i] != char(0xFF))
                fail(it.site, "the result registers of wgmma were changed before warpgroup_wait");
        }
        memcpy(d.of[lane], &d.sums[lane * d.size / sizeof(float)], d.size);
    }
}

void warpgroup_matmul(Matmul matmul, Site site) {
    warp_operation(begin, "wgmma", ~0u, &matmul, site);
}

struct Fenced {
    float* d;
    size_t size;
};

static void do_fence(void** operands, Site site) {
    WarpMatmuls& own = issue("wgmma.fence", site);
    own.fenced = true;
    auto& first = *static_cast<Fenced*>(operands[0]);
    Registers& d = own.registers[find(own, first.d, first.size, site)];
    for (int lane = 0; lane < WARP; lane++)
        d.of[lane] = (char*)static_cast<Fenced*>(operands[lane])->d;
}

static void do_commit(void**, Site site) { issue("wgmma.commit_group", site).group++; }

// To the compiler a wait changes only `d`: it may move reads of other results before the wait. So a wait
// may complete only matmuls with the result `d`.
struct Waited {
    int pending_groups;
    const float* d;
};

static void do_wait(void** operands, Site site) {
    char buffer[256];
    WarpMatmuls& own = issue("wgmma.wait_group", site);
    auto& first = *static_cast<Waited*>(operands[0]);
    int until = own.group - first.pending_groups;
    size_t done = 0;
    for (; done < own.pending.size() && own.pending[done].group < until; done++) {
        const Pending& it = own.pending[done];
        if (own.registers[it.d].of[0] != (const char*)first.d)
            fail(site, "warpgroup_wait for other registers than those of wgmma at %s",
                 text(it.site, buffer));
        finish(own, it);
    }
    own.pending.erase(own.pending.begin(), own.pending.begin() + done);
    own.fenced = false;
}

void warpgroup_fence(float* d, size_t size, Site site) {
    Fenced fenced{d, size};
    warp_operation(do_fence, "wgmma.fence", ~0u, &fenced, site);
}
void warpgroup_commit(Site site) {
    warp_operation(do_commit, "wgmma.commit_group", ~0u, nullptr, site);
}
void warpgroup_wait(int pending_groups, const float* d, Site site) {
    Waited waited{pending_groups, d};
    warp_operation(do_wait, "wgmma.wait_group", ~0u, &waited, site);
}

void check_registers(const char* address, size_t size, bool is_write, Site site) {
    if (!any) return;
    WarpMatmuls& own = warps[current->warp];
    for (Registers& registers : own.registers) {
        char* begin = registers.of[current->lane];
        if (address + size <= begin || address >= begin + registers.size) continue;
        if (registers.pending)
            fail(site, "%s of a register of wgmma before warpgroup_wait",
                 is_write ? "write" : "read");
        if (is_write) own.fenced = false;
    }
}

}  // namespace emulator
