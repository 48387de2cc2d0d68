// The kernels behind block_copy.h. Included by block_copy.cu alone.
//
// All work is cut into tiles: a few whole rows, or a part of one long row. A bounded number of CTAs,
// at most one per multiprocessor, takes the tiles in turn, so that a copy leaves the rest of the GPU
// to a decode step that runs beside it. Block ids and layer offsets travel as kernel parameters:
// nothing is uploaded before a launch and nothing has to be kept alive after it.
//
// Two kernels move tiles. The vector kernel passes them through registers and copes with anything.
// The bulk kernel (Hopper) lets the SM's copy unit bring them into shared memory and out again: one
// warp keeps a ring of stages full. Its CTAs fetch tiles from a common counter, because they do not
// share a link evenly: dealt out evenly beforehand, the last CTA holds everything up (on an H200, 16
// multiprocessors then reach 341 GB/s over NVLink instead of 373).

#ifndef MEMSERVE_BLOCK_COPY_KERNELS_CUH
#define MEMSERVE_BLOCK_COPY_KERNELS_CUH

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kMaxLayers = 128;   // per launch; deeper models take several
constexpr int kFewBlocks = 256;   // per launch, where that is enough: 4 KiB of parameters
constexpr int kManyBlocks = 3072; // per launch: 26 KiB of parameters, of 32,764 bytes allowed
constexpr int kWarp = 32;
constexpr int kVectorThreads = 1024;
constexpr int kUnroll = 4; // independent 16-byte loads in flight in each thread
constexpr int kVectorTile = kVectorThreads * kUnroll * 16;
constexpr int kBulkTile = 32 << 10;
constexpr int kBulkStages = 4;

// Division by a number that the host knows; exact for dividends below 2^31.
struct Divisor {
    unsigned divisor, multiplier, shift;

    __device__ unsigned divide(unsigned value) const {
        return divisor == 1 ? value : __umulhi(value, multiplier) >> shift;
    }
};

// What one launch copies, after rows and layers that touch each other have been merged.
template <int kBlocks>
struct Job {
    const char *source;
    char *target;
    int64_t source_block_stride, target_block_stride;
    int64_t source_row_stride, target_row_stride;
    int64_t row_bytes;
    uint32_t *counter;       // tiles given out so far, or null: every CTA takes the same number
    unsigned num_tiles;
    int num_rows;            // of one layer of one block
    int tile_width;          // bytes of a row in a tile
    int rows_per_tile;       // one, if a row takes several tiles
    Divisor tiles_per_row;   // one, if a tile takes several rows
    Divisor tiles_per_layer; // of one block
    Divisor num_layers;
    Divisor vectors_per_row; // of a tile
    int64_t source_layers[kMaxLayers], target_layers[kMaxLayers];
    int32_t source_ids[kBlocks], target_ids[kBlocks];
};

struct Tile {
    const char *source;
    char *target;
    int rows, width;
};

template <int kBlocks>
__device__ Tile locate(const Job<kBlocks> &job, unsigned index) {
    const unsigned page = job.tiles_per_layer.divide(index);
    const unsigned tile = index - page * job.tiles_per_layer.divisor;
    const unsigned block = job.num_layers.divide(page);
    const unsigned layer = page - block * job.num_layers.divisor;
    const unsigned rows_before = job.tiles_per_row.divide(tile);
    const unsigned part = tile - rows_before * job.tiles_per_row.divisor;
    const int row = static_cast<int>(rows_before) * job.rows_per_tile;
    const int64_t column = static_cast<int64_t>(part) * job.tile_width;
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

template <typename Vector, int kBlocks>
__device__ void copy_rows(const Job<kBlocks> &job, const Tile &tile) {
    constexpr unsigned kSize = sizeof(Vector);
    const unsigned count = tile.rows * (tile.width / kSize);
    for (unsigned first = threadIdx.x; first < count; first += kUnroll * kVectorThreads) {
        Vector values[kUnroll];
        int64_t targets[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned index = first + i * kVectorThreads;
            const int64_t row = job.vectors_per_row.divide(index);
            const unsigned before = static_cast<unsigned>(row) * job.vectors_per_row.divisor;
            const unsigned column = (index - before) * kSize;
            targets[i] = row * job.target_row_stride + column;
            if (index < count)
                values[i] = __ldcs(reinterpret_cast<const Vector *>(
                    tile.source + row * job.source_row_stride + column));
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
    for (unsigned index = blockIdx.x; index < job.num_tiles; index += gridDim.x) {
        const Tile tile = locate(job, index);
        if (tile.rows == 1)
            copy_row<Vector>(tile);
        else
            copy_rows<Vector>(job, tile);
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

// Gives a warp its tiles. The next index is fetched while the present tile is under way.
struct Dealer {
    uint32_t *counter;
    unsigned num_tiles;
    unsigned ahead; // of lane 0, if there is a counter

    __device__ Dealer(uint32_t *counter, unsigned num_tiles)
        : counter(counter), num_tiles(num_tiles), ahead(counter ? fetch() : blockIdx.x) {}

    // The warp's next tile, or num_tiles or more once there is none: then it must not ask again.
    __device__ unsigned next() {
        const unsigned index = __shfl_sync(~0u, ahead, 0);
        if (index < num_tiles) ahead = counter ? fetch() : index + gridDim.x;
        return index;
    }

  private:
    // Every CTA gets one index too many, and with the last of these the counter is back at zero.
    __device__ unsigned fetch() const {
        return threadIdx.x == 0 ? atomicInc(counter, num_tiles + gridDim.x - 1) : 0;
    }
};

#endif

// One warp per CTA; each lane moves every 32nd row of a tile. Stages are filled in the order of the
// ring and drained in the same order; a stage is filled again `kLag` tiles after it was drained,
// when its store has read it, so that loads and stores are in flight all the time.
template <int kBlocks>
__global__ void __launch_bounds__(kWarp, 1) copy_by_bulk(const __grid_constant__ Job<kBlocks> job) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    constexpr int kLag = kBulkStages / 2;
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t arrived[kBulkStages];
    __shared__ Tile tiles[kBulkStages];
    const int lane = threadIdx.x;
    if (lane == 0) {
        for (auto &barrier : arrived) barrier_init(&barrier);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();

    Dealer dealer(job.counter, job.num_tiles);
    bool has_more = true;
    int num_filled = 0, num_drained = 0;

    const auto fill = [&] {
        const unsigned index = dealer.next();
        has_more = index < job.num_tiles;
        if (!has_more) return;
        const int stage = num_filled++ % kBulkStages;
        const Tile tile = locate(job, index);
        if (lane == 0) {
            tiles[stage] = tile;
            barrier_expect(&arrived[stage], tile.rows * tile.width);
        }
        __syncwarp();
        for (int row = lane; row < tile.rows; row += kWarp)
            bulk_load(ring + stage * kBulkTile + row * tile.width,
                      tile.source + row * job.source_row_stride, tile.width, &arrived[stage]);
    };
    const auto drain = [&] {
        const int stage = num_drained % kBulkStages;
        barrier_wait(&arrived[stage], num_drained / kBulkStages & 1);
        const Tile tile = tiles[stage];
        for (int row = lane; row < tile.rows; row += kWarp)
            bulk_store(tile.target + row * job.target_row_stride,
                       ring + stage * kBulkTile + row * tile.width, tile.width);
        bulk_commit();
        ++num_drained;
    };

    while (has_more && num_filled < kBulkStages) fill();
    while (num_drained < num_filled) {
        drain();
        if (has_more && num_drained > kLag) {
            bulk_wait_read<kLag>();
            __syncwarp(); // of all lanes, before the stage is overwritten
            fill();
        }
    }
    bulk_wait_written(); // the kernel's end must mean that all is written
#endif
}

} // namespace
#endif
