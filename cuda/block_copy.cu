// The host side of block_copy.h: turns a copy into launches of block_copy_kernels.cuh, or into calls
// of the copy engines.

#include "block_copy.h"

#include "block_copy_kernels.cuh"
#include "current_device.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <vector>

namespace {

constexpr int kMinBulkRow = 512; // shorter rows are too many for one warp to issue

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

Divisor make_divisor(int64_t divisor) {
    if (divisor == 1) return {1, 0, 0};
    unsigned bits = 0;
    while (int64_t{1} << bits < divisor) ++bits;
    const uint64_t multiplier = ((uint64_t{1} << (31 + bits)) + divisor - 1) / divisor;
    return {static_cast<unsigned>(divisor), static_cast<unsigned>(multiplier), bits - 1};
}

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// All of `job` but what differs between the launches of one copy. False if its numbers do not fit.
template <int kBlocks>
bool describe(const MemserveCopy &copy, int tile_bytes, int vector_bytes, Job<kBlocks> &job) {
    job.source = reinterpret_cast<const char *>(copy.source.base);
    job.target = reinterpret_cast<char *>(copy.target.base);
    job.source_block_stride = copy.source.block_stride;
    job.target_block_stride = copy.target.block_stride;
    job.source_row_stride = copy.source.row_stride;
    job.target_row_stride = copy.target.row_stride;
    job.row_bytes = copy.row_bytes;
    job.counter = copy.counter;
    job.num_rows = copy.num_rows;
    job.tile_width = static_cast<int>(std::min<int64_t>(copy.row_bytes, tile_bytes));
    job.rows_per_tile = std::min(tile_bytes / job.tile_width, copy.num_rows);
    const int64_t tiles_per_row = divide_up(copy.row_bytes, job.tile_width);
    const int64_t tiles_per_layer = divide_up(copy.num_rows, job.rows_per_tile) * tiles_per_row;
    if (tiles_per_row > INT_MAX || tiles_per_layer > INT_MAX / kMaxLayers) return false;
    job.tiles_per_row = make_divisor(tiles_per_row);
    job.tiles_per_layer = make_divisor(tiles_per_layer);
    job.vectors_per_row = make_divisor(std::max(1, job.tile_width / vector_bytes));
    return true;
}

struct Launch {
    int method; // MEMSERVE_VECTOR or MEMSERVE_BULK
    int vector_bytes;
    int max_ctas;
    cudaStream_t stream;
};

template <int kBlocks>
cudaError_t launch(const Job<kBlocks> &job, const Launch &how) {
    const unsigned ctas = std::min(static_cast<unsigned>(how.max_ctas), job.num_tiles);
    if (how.method == MEMSERVE_BULK) {
        constexpr int kShared = kBulkStages * kBulkTile;
        const cudaError_t error = cudaFuncSetAttribute(
            copy_by_bulk<kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
        if (error != cudaSuccess) return error;
        copy_by_bulk<<<ctas, kWarp, kShared, how.stream>>>(job);
    } else if (how.vector_bytes == 16) {
        copy_by_vectors<int4><<<ctas, kVectorThreads, 0, how.stream>>>(job);
    } else if (how.vector_bytes == 4) {
        copy_by_vectors<int><<<ctas, kVectorThreads, 0, how.stream>>>(job);
    } else {
        copy_by_vectors<char><<<ctas, kVectorThreads, 0, how.stream>>>(job);
    }
    return cudaGetLastError();
}

template <int kBlocks>
cudaError_t launch_all(const MemserveCopy &copy, const Launch &how) {
    Job<kBlocks> job;
    const int tile_bytes = how.method == MEMSERVE_BULK ? kBulkTile : kVectorTile;
    if (!describe(copy, tile_bytes, how.vector_bytes, job)) return cudaErrorInvalidValue;
    for (int layer = 0; layer < copy.num_layers; layer += kMaxLayers) {
        const int layers = std::min(kMaxLayers, copy.num_layers - layer);
        job.num_layers = make_divisor(layers);
        std::copy_n(copy.source.layer_offsets + layer, layers, job.source_layers);
        std::copy_n(copy.target.layer_offsets + layer, layers, job.target_layers);
        const int tiles_per_block = layers * static_cast<int>(job.tiles_per_layer.divisor);
        const int step = std::min(kBlocks, INT_MAX / tiles_per_block);
        for (int block = 0; block < copy.num_blocks; block += step) {
            const int blocks = std::min(step, copy.num_blocks - block);
            std::copy_n(copy.source.block_ids + block, blocks, job.source_ids);
            std::copy_n(copy.target.block_ids + block, blocks, job.target_ids);
            job.num_tiles = static_cast<unsigned>(blocks) * tiles_per_block;
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

cudaError_t copy_by_kernel(MemserveCopy copy, int method, int max_sms, int device,
                           cudaStream_t stream) {
    int num_sms = 0, capability = 0;
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaStreamIsCapturing(stream, &captured);
    if (error != cudaSuccess) return error;

    // A graph may be replayed on any stream, beside whatever uses the counter there.
    if (captured != cudaStreamCaptureStatusNone) copy.counter = nullptr;
    const int aligned = alignment(copy);
    const bool can_bulk = capability >= 9 && aligned == 16 && copy.row_bytes % 16 == 0;
    if (method == MEMSERVE_BULK && !can_bulk) return cudaErrorInvalidValue;
    if (method == MEMSERVE_AUTO)
        method = can_bulk && copy.row_bytes >= kMinBulkRow ? MEMSERVE_BULK : MEMSERVE_VECTOR;
    const int vector_bytes = aligned == 16 ? 16 : aligned >= 4 ? 4 : 1;
    const Launch how{method, vector_bytes, std::min(max_sms, num_sms), stream};
    return copy.num_blocks <= kFewBlocks ? launch_all<kFewBlocks>(copy, how)
                                         : launch_all<kManyBlocks>(copy, how);
}

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
