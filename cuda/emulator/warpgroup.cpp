// Warpgroup matmuls (wgmma). Each of the four warps computes its 16 rows by itself, so they may
// be as far apart as the kernel lets them; all four must issue the same instructions.
//
// A matmul is computed at the wait for it. Until then its registers hold NaN, and its operands in
// shared memory must not change.
#include "state.h"

#include <cstring>

namespace emulator {

constexpr int ROWS = 16, DEPTH = 16, WARPS = 4;

using Elements = std::vector<uint16_t>;  // [rows, DEPTH]

struct Registers {  // of the lanes of a warp, one array of each
    char* of[WARP];
    size_t size;
    int pending;              // matmuls that use them
    std::vector<float> sums;  // [lane, size / 4]: what they will hold
};

struct Pending {
    Product product;  // as lane 0 gave it
    int group;
    Site site;
    size_t d, registers;  // indices
    Elements a, b;
};

struct WarpProducts {
    bool fenced;
    int group;
    std::vector<Registers> registers;
    std::vector<Pending> pending;
    size_t come;  // to how many instructions
};

struct Instruction {
    const char* name;
    Site site;
    uint64_t a, b;
};

static std::vector<WarpProducts> warps;
static std::vector<std::vector<Instruction>> instructions;  // of each warpgroup
static bool any;

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
            fail(warps[i].pending[0].site, "wgmma that warp %zu has never waited for", i);
        if (warps[i].come < all.size())
            fail(all[warps[i].come].site, "%s of a warpgroup, of which warp %zu never came to it",
                 all[warps[i].come].name, i);
    }
}

// The four warps must issue the same instructions.
static WarpProducts& join(const char* name, Site site, uint64_t a = 0, uint64_t b = 0) {
    char buffer[256];
    if (threads.size() % (WARP * WARPS)) fail(site, "%s in a block with less than four warps", name);
    any = true;
    WarpProducts& own = warps[current->warp];
    std::vector<Instruction>& all = instructions[current->warp / WARPS];
    if (own.come == all.size()) all.push_back({name, site, a, b});
    const Instruction& other = all[own.come++];
    if (other.site.address != site.address)
        fail(site, "%s, but another warp of the warpgroup has come to %s at %s", name, other.name,
             text(other.site, buffer));
    if (other.a != a || other.b != b)
        fail(site, "%s with another descriptor than in another warp of the warpgroup", name);
    return own;
}

// Matrices in shared memory -------------------------------------------------------------------------

struct Descriptor {
    unsigned start, leading, stride;  // bytes

    Descriptor(uint64_t bits, Site site)
        : start(bits << 4 & 0x3FFF0), leading(bits >> 12 & 0x3FFF0), stride(bits >> 28 & 0x3FFF0) {
        if (bits & 0x3FF1C000C000C000) fail(site, "wgmma descriptor with bits set that have no meaning");
        if (bits >> 62 != 1) fail(site, "wgmma descriptor without 128-byte swizzle: not emulated");
        if (bits >> 49 & 7 || start & 0x380)
            fail(site, "wgmma descriptor of a pattern that begins at no 1024 bytes: not emulated");
    }
};

// The 8 elements at an address of the layout before it is swizzled.
static void read_vector(uint16_t (&to)[8], unsigned address, Site site) {
    address ^= (address >> 7 & 7) << 4;
    char* from = shared_window() + (address & 0x3FFFF);
    if (!in_shared(from)) fail(site, "wgmma of what is not dynamic shared memory");
    read_memory(to, from, sizeof to, site);
    if (checking) check_proxy(from, sizeof to, site);
}

// Of [rows, DEPTH] the part from `first` on. K-major: a row's elements are contiguous; MN-major: those of
// a column do.
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

static Elements read_left(const WarpProducts& own, const Pending& it) {
    if (!it.product.registers)
        return read_matrix({it.product.a, it.site}, false, current->warp % WARPS * ROWS, ROWS, it.site);
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
    return read_matrix({it.product.b, it.site}, it.product.transposed, 0, it.product.columns, it.site);
}

// Products ------------------------------------------------------------------------------------------

// The index of registers of which lane 0's are at `first`.
static size_t find(WarpProducts& own, const void* first, size_t size, Site site) {
    for (size_t i = 0; i < own.registers.size(); i++) {
        Registers& known = own.registers[i];
        if (known.of[0] != first) continue;
        if (known.pending && known.size != size)
            fail(site, "wgmma with registers of another that is not waited for");
        known.size = size;
        return i;
    }
    own.registers.push_back({{}, size, 0, {}});
    return own.registers.size() - 1;
}

static void begin(void** operands, Site site) {
    const Product& first = *static_cast<Product*>(operands[0]);
    WarpProducts& own = join("wgmma", site, first.a, first.b);
    if (!own.fenced)
        fail(site, "wgmma without a warpgroup_fence since its registers were touched or waited for");
    size_t size = first.columns / 2 * sizeof(float);
    Pending it{first, own.group, site, find(own, first.d, size, site), 0, {}, {}};
    if (first.registers) it.registers = find(own, first.registers, 4 * sizeof(unsigned), site);
    Registers& d = own.registers[it.d];
    bool is_new = d.pending++ == 0;
    if (first.registers) own.registers[it.registers].pending++;
    if (is_new) d.sums.resize(WARP * size / sizeof(float));
    for (int lane = 0; lane < WARP; lane++) {
        const Product& product = *static_cast<Product*>(operands[lane]);
        if (product.a != first.a || product.b != first.b || product.adds != first.adds)
            fail(site, "wgmma with descriptors that differ between lanes");
        if (first.registers) own.registers[it.registers].of[lane] = (char*)product.registers;
        if (!is_new) continue;
        d.of[lane] = (char*)product.d;
        memcpy(&d.sums[lane * size / sizeof(float)], d.of[lane], size);
        memset(d.of[lane], 0xFF, size);
    }
    it.a = read_left(own, it);
    it.b = read_right(it);
    own.pending.push_back(std::move(it));
}

static void multiply(Registers& d, const Pending& it) {
    const Product& product = it.product;
    std::vector<float> a(it.a.size()), b(it.b.size());
    for (size_t i = 0; i < a.size(); i++) a[i] = product.widen(it.a[i]);
    for (size_t i = 0; i < b.size(); i++) b[i] = product.widen(it.b[i]);
    for (int lane = 0; lane < WARP; lane++) {
        float* sums = &d.sums[lane * product.columns / 2];
        for (int i = 0; i < product.columns / 2; i++) {
            const float* row = &a[(lane / 4 + i / 2 % 2 * 8) * DEPTH];
            const float* column = &b[(i / 4 * 8 + lane % 4 * 2 + i % 2) * DEPTH];
            float sum = 0;
            for (int k = 0; k < DEPTH; k++) sum += row[k] * column[k];
            sums[i] = (product.adds ? sums[i] : 0) + sum;
        }
    }
}

static void finish(WarpProducts& own, const Pending& it) {
    if (read_left(own, it) != it.a || read_right(it) != it.b)
        fail(it.site, "wgmma of what was changed before the wait for it");
    Registers& d = own.registers[it.d];
    multiply(d, it);
    if (it.product.registers) own.registers[it.registers].pending--;
    if (--d.pending) return;
    for (int lane = 0; lane < WARP; lane++) {
        for (size_t i = 0; i < d.size; i++) {
            if (d.of[lane][i] != char(0xFF))
                fail(it.site, "wgmma to registers that were changed before the wait for it");
        }
        memcpy(d.of[lane], &d.sums[lane * d.size / sizeof(float)], d.size);
    }
}

void warpgroup_product(Product product, Site site) {
    warp_operation(begin, "wgmma", ~0u, &product, site);
}

struct Fenced {
    float* d;
    size_t size;
};

static void do_fence(void** operands, Site site) {
    WarpProducts& own = join("wgmma.fence", site);
    own.fenced = true;
    auto& first = *static_cast<Fenced*>(operands[0]);
    Registers& d = own.registers[find(own, first.d, first.size, site)];
    for (int lane = 0; lane < WARP; lane++)
        d.of[lane] = (char*)static_cast<Fenced*>(operands[lane])->d;
}

static void do_commit(void**, Site site) { join("wgmma.commit_group", site).group++; }

// The compiler knows of `d` alone that it changes here: it may read others before.
struct Waited {
    int pending_groups;
    const float* d;
};

static void do_wait(void** operands, Site site) {
    char buffer[256];
    WarpProducts& own = join("wgmma.wait_group", site);
    auto& first = *static_cast<Waited*>(operands[0]);
    int until = own.group - first.pending_groups;
    size_t done = 0;
    for (; done < own.pending.size() && own.pending[done].group < until; done++) {
        const Pending& it = own.pending[done];
        if (own.registers[it.d].of[0] != (const char*)first.d)
            fail(site, "warpgroup_wait of other registers than wgmma has at %s", text(it.site, buffer));
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
    WarpProducts& own = warps[current->warp];
    for (Registers& registers : own.registers) {
        char* begin = registers.of[current->lane];
        if (address + size <= begin || address >= begin + registers.size) continue;
        if (registers.pending)
            fail(site, "%s of a register that wgmma uses: no warpgroup_wait before it",
                 is_write ? "write" : "read");
        if (is_write) own.fenced = false;
    }
}

}  // namespace emulator
