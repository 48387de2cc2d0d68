// Stand-alone check and timer of block_copy.cu.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 block_copy.cu block_copy_check.cu -o check
//     ./check           every case against a copy on the CPU, then timings
//     ./check --quick   the cases alone: small, for compute-sanitizer
//
// With two GPUs the target lies on the second one. Targets are poisoned, sources are fresh random
// bytes in each case, and the whole target is compared, so that bytes written beside the rows show.

#include "block_copy.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define CHECK(call) require((call), #call, __LINE__)

namespace {

void require(int error, const char *call, int line) {
    if (error == 0) return;
    std::fprintf(stderr, "line %d: %s: %s: %s\n", line, call, memserve_error_name(error),
                 memserve_error_text(error));
    std::exit(1);
}

// How the pages of a pool lie in memory.
enum class Layout { kBlockFirst, kLayerFirst };

struct Pool {
    std::vector<int64_t> layer_offsets;
    int64_t block_stride, row_stride, size_bytes;
};

// `pad` bytes lie before the first row and after each row.
Pool make_pool(Layout layout, int blocks, int layers, int rows, int64_t row_bytes, int64_t pad) {
    Pool pool;
    pool.row_stride = row_bytes + pad;
    const int64_t page = rows * pool.row_stride;
    const bool by_block = layout == Layout::kBlockFirst;
    pool.block_stride = by_block ? page * layers : page;
    for (int layer = 0; layer < layers; ++layer)
        pool.layer_offsets.push_back(pad + layer * (by_block ? page : page * blocks));
    pool.size_bytes = pad + page * layers * blocks;
    return pool;
}

struct Case {
    const char *name;
    Layout source, target;
    int layers, blocks, rows;
    int64_t row_bytes, source_pad, target_pad;
};

const Case kCases[] = {
    {"aggregated", Layout::kBlockFirst, Layout::kBlockFirst, 3, 7, 1, 24576, 0, 0},
    {"layer-first", Layout::kLayerFirst, Layout::kLayerFirst, 5, 9, 1, 4096, 0, 0},
    {"gather", Layout::kLayerFirst, Layout::kBlockFirst, 4, 6, 1, 70000, 0, 0},
    {"scatter", Layout::kBlockFirst, Layout::kLayerFirst, 4, 6, 1, 17408, 0, 0},
    {"long blocks", Layout::kBlockFirst, Layout::kBlockFirst, 4, 6, 1, 81920, 0, 0},
    {"heads 2 to 1", Layout::kBlockFirst, Layout::kBlockFirst, 3, 5, 16, 2048, 0, 2048},
    {"heads 1 to 3", Layout::kLayerFirst, Layout::kBlockFirst, 3, 5, 32, 256, 512, 0},
    {"long rows", Layout::kBlockFirst, Layout::kLayerFirst, 2, 3, 3, 150000, 32, 16},
    {"tails of 16", Layout::kLayerFirst, Layout::kBlockFirst, 3, 5, 7, 1000, 24, 8},
    {"aligned to 4", Layout::kBlockFirst, Layout::kBlockFirst, 2, 5, 3, 9004, 4, 12},
    {"odd", Layout::kBlockFirst, Layout::kLayerFirst, 3, 4, 5, 1237, 3, 1},
    {"single bytes", Layout::kLayerFirst, Layout::kBlockFirst, 2, 3, 9, 1, 2, 5},
    {"many layers", Layout::kLayerFirst, Layout::kLayerFirst, 131, 2, 1, 512, 0, 16},
    {"many blocks", Layout::kBlockFirst, Layout::kBlockFirst, 1, 3100, 1, 64, 16, 0},
};

std::vector<int32_t> pick(int count, int of, std::mt19937_64 &random) {
    std::vector<int32_t> ids(of);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(count);
    return ids;
}

std::vector<char> noise(int64_t size, std::mt19937_64 &random) {
    std::vector<char> bytes(size);
    for (auto &byte : bytes) byte = static_cast<char>(random());
    return bytes;
}

// The reference: one row after the other.
void copy_on_cpu(const MemserveCopy &copy, const char *source, char *target) {
    for (int block = 0; block < copy.num_blocks; ++block)
        for (int layer = 0; layer < copy.num_layers; ++layer)
            for (int row = 0; row < copy.num_rows; ++row) {
                const auto offset = [&](const MemserveSide &side) {
                    return side.layer_offsets[layer] + side.block_ids[block] * side.block_stride +
                           row * side.row_stride;
                };
                std::memcpy(target + offset(copy.target), source + offset(copy.source),
                            copy.row_bytes);
            }
}

struct Where {
    int device, target_device;
    cudaStream_t stream;
    uint32_t *counter; // of that stream
};

bool can_bulk(const Case &c) {
    return c.row_bytes % 16 == 0 && c.source_pad % 16 == 0 && c.target_pad % 16 == 0;
}

struct How {
    int method, max_sms;
    bool has_counter;
};

bool check(const Case &c, const How &how, const Where &where, std::mt19937_64 &random) {
    const int spare = 3; // blocks that are not copied
    const auto source_pool =
        make_pool(c.source, c.blocks + spare, c.layers, c.rows, c.row_bytes, c.source_pad);
    const auto target_pool =
        make_pool(c.target, c.blocks + spare, c.layers, c.rows, c.row_bytes, c.target_pad);
    const auto source_ids = pick(c.blocks, c.blocks + spare, random);
    const auto target_ids = pick(c.blocks, c.blocks + spare, random);
    const auto source_bytes = noise(source_pool.size_bytes, random);
    auto expected = noise(target_pool.size_bytes, random);

    char *source = nullptr, *target = nullptr;
    CHECK(cudaSetDevice(where.target_device));
    CHECK(cudaMalloc(&target, expected.size()));
    CHECK(cudaMemcpy(target, expected.data(), expected.size(), cudaMemcpyDefault));
    CHECK(cudaSetDevice(where.device));
    CHECK(cudaMalloc(&source, source_bytes.size()));
    CHECK(cudaMemcpy(source, source_bytes.data(), source_bytes.size(), cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());

    const MemserveCopy copy = {
        {reinterpret_cast<uint64_t>(source), source_pool.block_stride, source_pool.row_stride,
         source_pool.layer_offsets.data(), source_ids.data()},
        {reinterpret_cast<uint64_t>(target), target_pool.block_stride, target_pool.row_stride,
         target_pool.layer_offsets.data(), target_ids.data()},
        c.row_bytes, c.rows, c.layers, c.blocks, how.has_counter ? where.counter : nullptr};
    CHECK(memserve_copy_blocks(&copy, how.method, how.max_sms, where.device, where.stream));
    CHECK(cudaStreamSynchronize(where.stream));

    std::vector<char> got(expected.size());
    CHECK(cudaMemcpy(got.data(), target, got.size(), cudaMemcpyDefault));
    copy_on_cpu(copy, source_bytes.data(), expected.data());
    CHECK(cudaFree(source));
    CHECK(cudaFree(target));
    if (got == expected) return true;
    const auto at = std::mismatch(got.begin(), got.end(), expected.begin()).first - got.begin();
    std::printf("WRONG: %s, method %d, %d SMs, %s counter, first at byte %td of %zu\n", c.name,
                how.method, how.max_sms, how.has_counter ? "with" : "without", at, got.size());
    return false;
}

int check_all(const Where &where, bool has_bulk, std::mt19937_64 &random) {
    const How hows[] = {
        {MEMSERVE_AUTO, 16, true}, {MEMSERVE_VECTOR, 1, false}, {MEMSERVE_VECTOR, 16, false},
        {MEMSERVE_BULK, 1, true},  {MEMSERVE_BULK, 16, true},   {MEMSERVE_BULK, 16, false},
        {MEMSERVE_COPIES, 1, false}, {MEMSERVE_BATCH, 1, false},
    };
    int wrong = 0, cases = 0;
    for (const auto &c : kCases)
        for (const auto &how : hows) {
            if (how.method == MEMSERVE_BULK && !(has_bulk && can_bulk(c))) continue;
            ++cases;
            wrong += !check(c, how, where, random);
        }
    uint32_t count = 0;
    CHECK(cudaMemcpy(&count, where.counter, sizeof count, cudaMemcpyDefault));
    if (count) std::printf("WRONG: the counter is left at %u\n", count);
    std::printf("%d cases, %d wrong\n", cases, wrong);
    return wrong + (count != 0);
}

// Median of device time, in GB/s; every repetition takes other blocks.
double bandwidth(const Case &c, int method, int max_sms, const Where &where, int pool_blocks,
                 char *source, char *target, std::mt19937_64 &random) {
    constexpr int kRepeats = 9;
    const auto pool = make_pool(c.source, pool_blocks, c.layers, c.rows, c.row_bytes, 0);
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
        const auto source_ids = pick(c.blocks, pool_blocks, random);
        const auto target_ids = pick(c.blocks, pool_blocks, random);
        const auto side = [&](char *base, const std::vector<int32_t> &ids) {
            return MemserveSide{reinterpret_cast<uint64_t>(base), pool.block_stride, pool.row_stride,
                                pool.layer_offsets.data(), ids.data()};
        };
        const MemserveCopy copy = {side(source, source_ids), side(target, target_ids),
                                   c.row_bytes, c.rows, c.layers, c.blocks, where.counter};
        CHECK(cudaEventRecord(start, where.stream));
        CHECK(memserve_copy_blocks(&copy, method, max_sms, where.device, where.stream));
        CHECK(cudaEventRecord(end, where.stream));
        CHECK(cudaEventSynchronize(end));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, start, end));
        if (i >= 2) times.push_back(ms); // the first ones warm up
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    const double size = double(c.row_bytes) * c.rows * c.layers * c.blocks;
    return size / times[times.size() / 2] * 1e-6;
}

void time_all(const Where &where, bool has_bulk, std::mt19937_64 &random) {
    const Case timed[] = {
        {"13B, 128 blocks", Layout::kBlockFirst, Layout::kBlockFirst, 40, 128, 1, 327680, 0, 0},
        {"8B, 128 blocks", Layout::kBlockFirst, Layout::kBlockFirst, 32, 128, 1, 65536, 0, 0},
        {"8B, layer-first", Layout::kLayerFirst, Layout::kLayerFirst, 32, 128, 1, 65536, 0, 0},
    };
    constexpr int kPoolBlocks = 256;
    constexpr int64_t kPoolBytes = kPoolBlocks * 40 * 327680LL;
    char *source = nullptr, *target = nullptr;
    CHECK(cudaSetDevice(where.target_device));
    CHECK(cudaMalloc(&target, kPoolBytes));
    CHECK(cudaSetDevice(where.device));
    CHECK(cudaMalloc(&source, kPoolBytes));
    const auto bytes = noise(64 << 20, random);
    for (int64_t at = 0; at < kPoolBytes; at += bytes.size())
        CHECK(cudaMemcpy(source + at, bytes.data(),
                         std::min<int64_t>(bytes.size(), kPoolBytes - at), cudaMemcpyDefault));

    std::printf("\n%-18s %8s %8s  GB/s at 4, 8, 10, 12, 16, 32, 132 SMs\n", "", "copies", "batch");
    for (const auto &c : timed) {
        const auto rate = [&](int method, int max_sms) {
            return bandwidth(c, method, max_sms, where, kPoolBlocks, source, target, random);
        };
        std::printf("%-18s %8.1f %8.1f\n", c.name, rate(MEMSERVE_COPIES, 1), rate(MEMSERVE_BATCH, 1));
        for (const int method : {MEMSERVE_VECTOR, MEMSERVE_BULK}) {
            if (method == MEMSERVE_BULK && !has_bulk) continue;
            std::printf("%-36s", method == MEMSERVE_BULK ? "  bulk kernel" : "  vector kernel");
            for (const int max_sms : {4, 8, 10, 12, 16, 32, 132})
                std::printf(" %7.1f", rate(method, max_sms));
            std::printf("\n");
        }
    }
    CHECK(cudaFree(source));
    CHECK(cudaFree(target));
}

} // namespace

int main(int argc, char **argv) {
    const bool is_quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
    if (argc > 2 || (argc == 2 && !is_quick)) {
        std::fprintf(stderr, "usage: %s [--quick]\n", argv[0]);
        return 2;
    }
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    Where where{0, count > 1 ? 1 : 0, nullptr, nullptr};
    if (where.target_device != where.device)
        CHECK(memserve_enable_peer_access(where.device, where.target_device));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, where.device));
    CHECK(cudaSetDevice(where.device));
    CHECK(cudaStreamCreateWithFlags(&where.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&where.counter, sizeof(uint32_t)));
    CHECK(cudaMemset(where.counter, 0, sizeof(uint32_t)));
    CHECK(cudaDeviceSynchronize());
    const uint64_t seed = std::random_device{}();
    std::mt19937_64 random(seed);
    std::printf("%s, target on device %d, seed %llu\n", properties.name, where.target_device,
                static_cast<unsigned long long>(seed));

    const bool has_bulk = properties.major >= 9;
    const int wrong = check_all(where, has_bulk, random);
    if (wrong == 0 && !is_quick) time_all(where, has_bulk, random);
    CHECK(cudaFree(where.counter));
    CHECK(cudaStreamDestroy(where.stream));
    return wrong ? 1 : 0;
}
