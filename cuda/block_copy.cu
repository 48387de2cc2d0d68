// Kernels and copy-engine calls behind block_copy.h.
//
// All work is cut into tiles: a few whole rows, or a part of one long row. A bounded number of CTAs,
// at most one per multiprocessor, takes the tiles in turn, so that a copy leaves the rest of the GPU
// to a decode step that runs beside it. Block ids and layer offsets travel as kernel parameters:
// nothing is uploaded before a launch and nothing has to be kept alive after it.
//
// Two kernels move tiles. The vector kernel passes them through registers and copes with anything.
// The bulk kernel (Hopper) lets the SM's copy unit bring them into shared memory and out again: one
// warp keeps a ring of stages full, which needs fewer multiprocessors for the same bandwidth.

#include "block_copy.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <vector>

namespace {

constexpr int kMaxLayers = 128;      // per launch; deeper models take several
constexpr int kUnrollBlocks = 256;      // per launch, where that is enough: 4 KiB of parameters
constexpr int kManyBlocks = 3072;    // per launch: 26 KiB of parameters, of 32,764 bytes allowed
constexpr int kVectorThreads = 1024;
constexpr int kUnroll = 4;           // independent 16-byte loads in flight in each thread
constexpr int kVectorTile = kVectorThreads * kUnroll * 16;
constexpr int kBulkTile = 16 << 10;
#ifdef MEMSERVE_BULK_STAGES
constexpr int kBulkStages = MEMSERVE_BULK_STAGES;
#else
constexpr int kBulkStages = 8;
#endif
constexpr int kMinBulkRow = 512; // shorter ones are too many for one warp to issue
constexpr int kWarp = 32;

// What one launch copies, after rows and layers that touch each other have been merged.
template <int kBlocks>
struct Job {
    const char *source;
    char *target;
    int64_t source_block_stride, target_block_stride;
    int64_t source_row_stride, target_row_stride;
    int64_t row_bytes;
    int num_rows, num_layers, num_tiles;
    int tile_width;      // bytes of a row in a tile
    int rows_per_tile;   // one, if a row takes several tiles
    int tiles_per_row;   // one, if a tile takes several rows
    int tiles_per_layer; // of one block
    int64_t source_layers[kMaxLayers], target_layers[kMaxLayers];
    int32_t source_ids[kBlocks], target_ids[kBlocks];
};

struct Tile {
    const char *source;
    char *target;
    int rows, width;
};

template <int kBlocks>
__device__ Tile locate(const Job<kBlocks> &job, int index) {
    const int page = index / job.tiles_per_layer;
    const int tile = index - page * job.tiles_per_layer;
    const int block = page / job.num_layers;
    const int layer = page - block * job.num_layers;
    const int row = tile / job.tiles_per_row * job.rows_per_tile;
    const int64_t column = static_cast<int64_t>(tile % job.tiles_per_row) * job.tile_width;
    return {
        job.source + job.source_layers[layer] + job.source_ids[block] * job.source_block_stride +
            row * job.source_row_stride + column,
        job.target + job.target_layers[layer] + job.target_ids[block] * job.target_block_stride +
            row * job.target_row_stride + column,
        min(job.rows_per_tile, job.num_rows - row),
        static_cast<int>(min(static_cast<int64_t>(job.tile_width), job.row_bytes - column)),
    };
}

// ---------------------------------------------------------------- vector kernel

// Where the `index`-th vector of a tile starts, on both sides.
template <typename Vector>
struct Cursor {
    int64_t source_row_stride, target_row_stride;
    unsigned per_row;    // vectors
    unsigned reciprocal; // ceil(2^32 / per_row): exact, since a tile has at most 2^16 vectors

    __device__ void at(unsigned index, int64_t &source, int64_t &target) const {
        const unsigned row = per_row == 1 ? index : __umulhi(index, reciprocal);
        const int64_t column = (index - row * per_row) * static_cast<unsigned>(sizeof(Vector));
        source = row * source_row_stride + column;
        target = row * target_row_stride + column;
    }
};

// Loads and stores below are marked as streaming: the data is not needed again, the L2's content is.

template <typename Vector>
__device__ void copy_row(const Tile &tile) {
    const auto *source = reinterpret_cast<const Vector *>(tile.source);
    auto *target = reinterpret_cast<Vector *>(tile.target);
    const int count = tile.width / static_cast<int>(sizeof(Vector));
    for (int first = threadIdx.x; first < count; first += kUnroll * kVectorThreads) {
        Vector values[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if (first + i * kVectorThreads < count)
                values[i] = __ldcs(source + first + i * kVectorThreads);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if (first + i * kVectorThreads < count)
                __stcs(target + first + i * kVectorThreads, values[i]);
    }
}

template <typename Vector>
__device__ void copy_rows(const Tile &tile, const Cursor<Vector> &cursor) {
    const unsigned count = tile.rows * cursor.per_row;
    for (unsigned first = threadIdx.x; first < count; first += kUnroll * kVectorThreads) {
        Vector values[kUnroll];
        int64_t targets[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned index = first + i * kVectorThreads;
            int64_t source;
            cursor.at(index, source, targets[i]);
            if (index < count) values[i] = __ldcs(reinterpret_cast<const Vector *>(tile.source + source));
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if (first + i * kVectorThreads < count)
                __stcs(reinterpret_cast<Vector *>(tile.target + targets[i]), values[i]);
    }
}

// The bytes of each row that do not fill a vector.
template <typename Vector, int kBlocks>
__device__ void copy_tails(const Job<kBlocks> &job, const Tile &tile) {
    const int body = tile.width / static_cast<int>(sizeof(Vector)) * static_cast<int>(sizeof(Vector));
    const int tail = tile.width - body;
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.rows * tail; i += kVectorThreads) {
        const int64_t row = i / tail;
        const int column = body + i % tail;
        tile.target[row * job.target_row_stride + column] =
            tile.source[row * job.source_row_stride + column];
    }
}

template <typename Vector, int kBlocks>
__global__ void __launch_bounds__(kVectorThreads)
    copy_by_vectors(const __grid_constant__ Job<kBlocks> job) {
    const unsigned per_row = job.tile_width / static_cast<unsigned>(sizeof(Vector));
    const unsigned reciprocal = per_row > 1 ? 0xFFFFFFFFu / per_row + 1 : 0;
    const Cursor<Vector> cursor{job.source_row_stride, job.target_row_stride, per_row, reciprocal};
    for (int index = blockIdx.x; index < job.num_tiles; index += gridDim.x) {
        const Tile tile = locate(job, index);
        if (tile.rows == 1)
            copy_row<Vector>(tile);
        else
            copy_rows(tile, cursor);
        if (tile.width % sizeof(Vector)) copy_tails<Vector>(job, tile);
    }
}

// ---------------------------------------------------------------- bulk kernel

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ unsigned shared_address(const void *pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(uint64_t *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void barrier_expect(uint64_t *barrier, int size) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(size)
                 : "memory");
}

__device__ void barrier_wait(uint64_t *barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(phase)
            : "memory");
}

__device__ void bulk_load(char *shared, const char *source, int size, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(__cvta_generic_to_global(source)), "r"(size), "r"(shared_address(barrier))
        : "memory");
}

__device__ void bulk_store(char *target, const char *shared, int size) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(target)),
                 "r"(shared_address(shared)), "r"(size)
                 : "memory");
}

__device__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `kPending` of this thread's groups still read shared memory.
template <int kPending>
__device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#endif

// One warp per CTA; each lane moves every 32nd row of a tile.
//
//     tile      k                    k + kStages - kLag
//     stage     store, commit        load, once the store of the stage before it was read out
template <int kStages, int kBlocks>
__global__ void __launch_bounds__(kWarp, 1) copy_by_bulk(const __grid_constant__ Job<kBlocks> job) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    constexpr int kLag = kStages / 2; // stores that may be in flight while stages are refilled
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[kStages];
    const int lane = threadIdx.x;
    const int count = (job.num_tiles - static_cast<int>(blockIdx.x) - 1) / static_cast<int>(gridDim.x) + 1;

    if (lane == 0) {
        for (int stage = 0; stage < kStages; ++stage) barrier_init(&full[stage]);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();

    auto fill = [&](int k) {
        const Tile tile = locate(job, blockIdx.x + k * gridDim.x);
        char *stage = ring + k % kStages * kBulkTile;
        uint64_t *barrier = &full[k % kStages];
        if (lane == 0) barrier_expect(barrier, tile.rows * tile.width);
        __syncwarp();
        for (int row = lane; row < tile.rows; row += kWarp)
            bulk_load(stage + row * tile.width, tile.source + row * job.source_row_stride, tile.width,
                      barrier);
    };
    auto drain = [&](int k) {
        const Tile tile = locate(job, blockIdx.x + k * gridDim.x);
        const char *stage = ring + k % kStages * kBulkTile;
        barrier_wait(&full[k % kStages], k / kStages & 1);
        for (int row = lane; row < tile.rows; row += kWarp)
            bulk_store(tile.target + row * job.target_row_stride, stage + row * tile.width, tile.width);
        bulk_commit();
    };

    for (int k = 0; k < min(kStages, count); ++k) fill(k);
    for (int k = 0; k < count; ++k) {
        drain(k);
        const int next = k - kLag + kStages;
        if (k >= kLag && next < count) {
            bulk_wait_read<kLag>();
            __syncwarp();
            fill(next);
        }
    }
    bulk_wait_written(); // shared memory must outlive the reads, and the kernel's end must mean written
#endif
}

// ---------------------------------------------------------------- host side

bool layers_touch(const MemserveSide &side, int num_layers, int64_t row_bytes) {
    for (int layer = 1; layer < num_layers; ++layer)
        if (side.layer_offsets[layer] != side.layer_offsets[0] + layer * row_bytes) return false;
    return true;
}

// The same copy with rows, and then layers, made one where they touch on both sides.
MemserveCopy merge(MemserveCopy copy) {
    const auto &source = copy.source, &target = copy.target;
    if (source.row_stride == copy.row_bytes && target.row_stride == copy.row_bytes) {
        copy.row_bytes *= copy.num_rows;
        copy.num_rows = 1;
    }
    if (copy.num_rows == 1 && layers_touch(source, copy.num_layers, copy.row_bytes) &&
        layers_touch(target, copy.num_layers, copy.row_bytes)) {
        copy.row_bytes *= copy.num_layers;
        copy.num_layers = 1;
    }
    return copy;
}

// The largest power of two, at most 16, that divides every row's address on both sides.
int alignment(const MemserveCopy &copy) {
    uint64_t bits = 16;
    for (const auto *side : {&copy.source, &copy.target}) {
        bits |= side->base | static_cast<uint64_t>(side->block_stride);
        if (copy.num_rows > 1) bits |= static_cast<uint64_t>(side->row_stride);
        for (int layer = 0; layer < copy.num_layers; ++layer)
            bits |= static_cast<uint64_t>(side->layer_offsets[layer]);
    }
    return static_cast<int>(bits & -bits);
}

// All of `job` but what differs between the launches of one copy.
template <int kBlocks>
void describe(const MemserveCopy &copy, int tile_bytes, Job<kBlocks> &job) {
    job.source = reinterpret_cast<const char *>(copy.source.base);
    job.target = reinterpret_cast<char *>(copy.target.base);
    job.source_block_stride = copy.source.block_stride;
    job.target_block_stride = copy.target.block_stride;
    job.source_row_stride = copy.source.row_stride;
    job.target_row_stride = copy.target.row_stride;
    job.row_bytes = copy.row_bytes;
    job.num_rows = copy.num_rows;
    job.tile_width = static_cast<int>(std::min<int64_t>(copy.row_bytes, tile_bytes));
    job.rows_per_tile = std::min(tile_bytes / job.tile_width, copy.num_rows);
    job.tiles_per_row = static_cast<int>((copy.row_bytes + job.tile_width - 1) / job.tile_width);
    job.tiles_per_layer =
        (copy.num_rows + job.rows_per_tile - 1) / job.rows_per_tile * job.tiles_per_row;
}

struct Launch {
    int method; // MEMSERVE_VECTOR or MEMSERVE_BULK
    int alignment;
    int max_ctas;
    cudaStream_t stream;
};

template <int kStages, int kBlocks>
cudaError_t launch_bulk(const Job<kBlocks> &job, int ctas, cudaStream_t stream) {
    constexpr int kShared = kStages * kBulkTile;
    const auto kernel = copy_by_bulk<kStages, kBlocks>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return error;
    kernel<<<ctas, kWarp, kShared, stream>>>(job);
    return cudaGetLastError();
}

template <int kBlocks>
cudaError_t launch(const Job<kBlocks> &job, const Launch &launch) {
    const int ctas = std::min(launch.max_ctas, job.num_tiles);
    if (launch.method == MEMSERVE_BULK) return launch_bulk<kBulkStages>(job, ctas, launch.stream);
    if (launch.alignment == 16)
        copy_by_vectors<int4><<<ctas, kVectorThreads, 0, launch.stream>>>(job);
    else if (launch.alignment >= 4)
        copy_by_vectors<int><<<ctas, kVectorThreads, 0, launch.stream>>>(job);
    else
        copy_by_vectors<char><<<ctas, kVectorThreads, 0, launch.stream>>>(job);
    return cudaGetLastError();
}

template <int kBlocks>
cudaError_t launch_all(const MemserveCopy &copy, const Launch &how) {
    const int tile_bytes = how.method == MEMSERVE_BULK ? kBulkTile : kVectorTile;
    Job<kBlocks> job;
    describe(copy, tile_bytes, job);
    for (int layer = 0; layer < copy.num_layers; layer += kMaxLayers) {
        job.num_layers = std::min(kMaxLayers, copy.num_layers - layer);
        std::copy_n(copy.source.layer_offsets + layer, job.num_layers, job.source_layers);
        std::copy_n(copy.target.layer_offsets + layer, job.num_layers, job.target_layers);
        const int64_t tiles_per_block = int64_t{1} * job.num_layers * job.tiles_per_layer;
        const int step = static_cast<int>(std::min<int64_t>(kBlocks, INT_MAX / tiles_per_block));
        if (step == 0) return cudaErrorInvalidValue;
        for (int block = 0; block < copy.num_blocks; block += step) {
            const int count = std::min(step, copy.num_blocks - block);
            std::copy_n(copy.source.block_ids + block, count, job.source_ids);
            std::copy_n(copy.target.block_ids + block, count, job.target_ids);
            job.num_tiles = static_cast<int>(count * tiles_per_block);
            if (const cudaError_t error = launch(job, how)) return error;
        }
    }
    return cudaSuccess;
}

// Contiguous on both sides.
struct Runs {
    std::vector<const void *> sources;
    std::vector<void *> targets;
    std::vector<size_t> sizes;

    void add(uint64_t source, uint64_t target, size_t size) {
        if (!sizes.empty() && end(sources.back()) == source && end(targets.back()) == target) {
            sizes.back() += size;
            return;
        }
        sources.push_back(reinterpret_cast<const void *>(source));
        targets.push_back(reinterpret_cast<void *>(target));
        sizes.push_back(size);
    }

  private:
    uint64_t end(const void *start) const { return reinterpret_cast<uint64_t>(start) + sizes.back(); }
};

uint64_t row_address(const MemserveSide &side, int layer, int block, int row) {
    return side.base + side.layer_offsets[layer] + side.block_ids[block] * side.block_stride +
           row * side.row_stride;
}

Runs find_runs(const MemserveCopy &copy) {
    Runs runs;
    for (int layer = 0; layer < copy.num_layers; ++layer)
        for (int block = 0; block < copy.num_blocks; ++block)
            for (int row = 0; row < copy.num_rows; ++row)
                runs.add(row_address(copy.source, layer, block, row),
                         row_address(copy.target, layer, block, row),
                         static_cast<size_t>(copy.row_bytes));
    return runs;
}

cudaError_t copy_by_engines(const MemserveCopy &copy, int method, cudaStream_t stream) {
    Runs runs = find_runs(copy);
#if CUDART_VERSION >= 13000
    const bool is_legacy_stream = stream == nullptr || stream == cudaStreamLegacy;
    if (method == MEMSERVE_BATCH && !is_legacy_stream) { // that stream takes no batches
        cudaMemcpyAttributes attributes = {};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
        size_t first = 0;
        return cudaMemcpyBatchAsync(runs.targets.data(), runs.sources.data(), runs.sizes.data(),
                                    runs.sizes.size(), &attributes, &first, 1, stream);
    }
#endif
    for (size_t i = 0; i < runs.sizes.size(); ++i) {
        const cudaError_t error = cudaMemcpyAsync(runs.targets[i], runs.sources[i], runs.sizes[i],
                                                  cudaMemcpyDefault, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t copy_by_kernel(const MemserveCopy &copy, int method, int max_sms, int device,
                           cudaStream_t stream) {
    int num_sms = 0, capability = 0;
    cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;

    const int aligned = alignment(copy);
    const bool can_bulk = capability >= 9 && aligned == 16 && copy.row_bytes % 16 == 0;
    if (method == MEMSERVE_BULK && !can_bulk) return cudaErrorInvalidValue;
    if (method == MEMSERVE_AUTO)
        method = can_bulk && copy.row_bytes >= kMinBulkRow ? MEMSERVE_BULK : MEMSERVE_VECTOR;
    const Launch how{method, aligned, std::min(max_sms, num_sms), stream};
    return copy.num_blocks <= kUnrollBlocks ? launch_all<kUnrollBlocks>(copy, how)
                                         : launch_all<kManyBlocks>(copy, how);
}

// Makes `device` current, and what was current before it current again.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        error_ = cudaGetDevice(&before_);
        if (error_ == cudaSuccess && before_ != device) {
            error_ = cudaSetDevice(device);
            changed_ = error_ == cudaSuccess;
        }
    }
    ~CurrentDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;
    cudaError_t error() const { return error_; }

  private:
    int before_ = 0;
    bool changed_ = false;
    cudaError_t error_ = cudaSuccess;
};

} // namespace

int memserve_copy_blocks(const MemserveCopy *copy, int method, int max_sms, int device,
                         void *stream) {
    if (copy->num_blocks < 0 || copy->num_layers < 0 || copy->num_rows < 0 || copy->row_bytes < 0 ||
        max_sms < 1 || method < MEMSERVE_AUTO || method > MEMSERVE_BATCH)
        return cudaErrorInvalidValue;
    if (!copy->num_blocks || !copy->num_layers || !copy->num_rows || !copy->row_bytes)
        return cudaSuccess;
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return current.error();
    const MemserveCopy merged = merge(*copy);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (method == MEMSERVE_COPIES || method == MEMSERVE_BATCH)
        return copy_by_engines(merged, method, queue);
    return copy_by_kernel(merged, method, max_sms, device, queue);
}

int memserve_enable_peer_access(int device, int peer) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return current.error();
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
    cudaGetLastError(); // the refusal is no failure: do not leave it to the next call
    return cudaSuccess;
}

const char *memserve_error_name(int code) {
    return cudaGetErrorName(static_cast<cudaError_t>(code));
}

const char *memserve_error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}
