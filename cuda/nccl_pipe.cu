// See nccl_pipe.h. The order of work on the two streams of a pipe, for a piece in slot s:
//
//     sender      copies    wait passed[s], gather, record copied[s]
//                 passage   wait copied[s], send, record passed[s]
//     receiver    passage   wait copied[s], receive, record passed[s]
//                 copies    wait passed[s], scatter, record copied[s]
//
// A non-blocking communicator launches in a thread of NCCL's: until it says that it has, nothing may
// be queued on the passage behind that launch. A blocking one has launched when the call returns.
#include "nccl_pipe.h"

#include "current_device.cuh"

#include <cuda_runtime.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <new>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSuccess = 0, kInProgress = 7, kBytes = 1; // of ncclResult_t and ncclDataType_t
constexpr auto kSpin = std::chrono::microseconds(200);   // a launch takes less than a sleep
constexpr auto kPause = std::chrono::microseconds(5);

struct CudaError {
    cudaError_t code;
};

struct NcclError {
    int code;
};

void check(cudaError_t code) {
    if (code != cudaSuccess) throw CudaError{code};
}

class Event {
  public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    Event(Event &&other) noexcept : event_(other.event_) { other.event_ = nullptr; }
    ~Event() {
        if (event_) cudaEventDestroy(event_);
    }
    void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream)); }
    void hold(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_, 0)); }
    bool is_over() const {
        const cudaError_t code = cudaEventQuery(event_);
        if (code == cudaErrorNotReady) {
            cudaGetLastError(); // it is no failure: do not leave it to the next call
            return false;
        }
        check(code);
        return true;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

class Stream {
  public:
    Stream() {
        int least = 0, greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    }
    Stream(const Stream &) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

// Of the bulk kernel: see MemserveCopy.
class Counter {
  public:
    explicit Counter(cudaStream_t stream) {
        check(cudaMalloc(&memory_, sizeof(*memory_)));
        check(cudaMemsetAsync(memory_, 0, sizeof(*memory_), stream));
    }
    Counter(const Counter &) = delete;
    ~Counter() { cudaFree(memory_); }
    uint32_t *get() const { return memory_; }

  private:
    uint32_t *memory_ = nullptr;
};

// What one launch moves.
struct Piece {
    std::vector<int32_t> block_ids;
    int slot;
    int first_layer, num_layers;
    bool is_gathered = false;
};

struct Part {
    uint64_t address;
    size_t size;
};

bool is_readable(int file) {
    pollfd watched = {file, POLLIN, 0};
    return file >= 0 && poll(&watched, 1, 0) > 0;
}

} // namespace

struct MemservePipe {
    explicit MemservePipe(const MemservePipeConfig &config)
        : config_(config),
          layer_offsets_(config.blocks.layer_offsets, config.blocks.layer_offsets + config.num_layers),
          ends_(config.max_ahead) {
        config_.blocks.layer_offsets = layer_offsets_.data();
        for (int block = 0; block < config.slot_blocks; ++block) slot_ids_.push_back(block);
        for (int layer = 0; layer < config.num_layers; ++layer)
            slot_layers_.push_back(layer * config.row_bytes * config.num_rows);
    }

    void put(const int32_t *block_ids, const int32_t *chunk_sizes, int num_chunks) {
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
            const int size = chunk_sizes[chunk];
            if (size < 1 || size > config_.slot_blocks) throw CudaError{cudaErrorInvalidValue};
            const std::vector<int32_t> ids(block_ids, block_ids + size);
            block_ids += size;
            if (config_.pieces == MEMSERVE_PAGES)
                for (const int32_t id : ids)
                    for (int layer = 0; layer < config_.num_layers; ++layer) add({id}, layer, 1);
            else
                add(ids, 0, config_.num_layers);
        }
    }

    void run(int64_t finished, int watch, Clock::duration patience) {
        has_settled(); // what has failed meanwhile is said also if there is nothing to do
        const auto deadline = Clock::now() + patience;
        auto moved_at = Clock::now();
        while (true) {
            if (advance()) moved_at = Clock::now();
            if (waiting_.empty() && counts_.finished >= finished) return;
            const auto now = Clock::now();
            if (now >= deadline || is_readable(watch)) return;
            if (now - moved_at > kSpin) std::this_thread::sleep_for(kPause);
        }
    }

    // Nothing may be queued on the streams by anybody else: the communicator was aborted.
    void drain() {
        check(cudaStreamSynchronize(passage_));
        check(cudaStreamSynchronize(copies_));
    }

    int device() const { return config_.device; }
    const MemservePipeCounts &counts() const { return counts_; }
    void note(NcclError error) { counts_.nccl_error = error.code; }

  private:
    void add(const std::vector<int32_t> &ids, int first_layer, int num_layers) {
        const int slot = static_cast<int>(counts_.put++ % MEMSERVE_PIPE_SLOTS);
        waiting_.push_back({ids, slot, first_layer, num_layers});
    }

    // Do all that can be done now; whether that was anything.
    bool advance() {
        bool has_moved = false;
        while (counts_.finished < counts_.launched && end_of(counts_.finished).is_over()) {
            ++counts_.finished;
            has_moved = true;
        }
        if (is_launching_) {
            if (!has_settled()) return has_moved;
            is_launching_ = false;
            follow(waiting_.front());
            waiting_.pop_front();
            has_moved = true;
        }
        if (waiting_.empty() || counts_.launched - counts_.finished >= config_.max_ahead)
            return has_moved;
        gather(waiting_.front());
        launch(waiting_.front());
        is_launching_ = true;
        if (waiting_.size() > 1) gather(waiting_[1]); // while NCCL launches this one
        return true;
    }

    // Whether NCCL has launched what it was told to.
    bool has_settled() {
        int state = kSuccess;
        require(config_.nccl.get_async_error(config_.communicator, &state));
        require(state);
        return state == kSuccess;
    }

    void gather(Piece &piece) {
        if (!config_.is_sender || !is_staged() || piece.is_gathered) return;
        passed_[piece.slot].hold(copies_);
        copy(piece, blocks(piece), staging(piece));
        copied_[piece.slot].record(copies_);
        piece.is_gathered = true;
    }

    void launch(const Piece &piece) {
        if (is_staged()) copied_[piece.slot].hold(passage_);
        const auto &nccl = config_.nccl;
        require(nccl.group_start());
        std::vector<int> codes;
        for (const Part &part : parts(piece)) {
            const auto data = reinterpret_cast<void *>(part.address);
            codes.push_back(config_.is_sender
                                ? nccl.send(data, part.size, kBytes, config_.peer,
                                            config_.communicator, passage_)
                                : nccl.receive(data, part.size, kBytes, config_.peer,
                                               config_.communicator, passage_));
        }
        codes.push_back(nccl.group_end()); // in any case
        for (const int code : codes) require(code);
    }

    // The launch is on the passage: queue what comes behind it.
    void follow(const Piece &piece) {
        passed_[piece.slot].record(passage_);
        const bool is_scattered = is_staged() && !config_.is_sender;
        if (is_scattered) {
            passed_[piece.slot].hold(copies_);
            copy(piece, staging(piece), blocks(piece));
            copied_[piece.slot].record(copies_);
        }
        end_of(counts_.launched).record(is_scattered ? copies_ : passage_);
        ++counts_.launched;
    }

    void copy(const Piece &piece, const MemserveSide &source, const MemserveSide &target) {
        const MemserveCopy copy = {source,
                                   target,
                                   config_.row_bytes,
                                   config_.num_rows,
                                   config_.num_layers,
                                   static_cast<int32_t>(piece.block_ids.size()),
                                   counter_.get()};
        check(static_cast<cudaError_t>(memserve_copy_blocks(
            &copy, MEMSERVE_AUTO, config_.max_sms, config_.device, copies_)));
    }

    MemserveSide blocks(const Piece &piece) const {
        MemserveSide side = config_.blocks;
        side.block_ids = piece.block_ids.data();
        return side;
    }

    MemserveSide staging(const Piece &piece) const {
        return {config_.slots[piece.slot], block_bytes(), config_.row_bytes, slot_layers_.data(),
                slot_ids_.data()};
    }

    // Where the bytes of a piece lie, in order. However the blocks lie here, the other end cuts alike.
    std::vector<Part> parts(const Piece &piece) const {
        const size_t num_blocks = piece.block_ids.size();
        if (is_staged()) return {{config_.slots[piece.slot], block_bytes() * num_blocks}};
        const size_t size = block_bytes() / config_.num_layers * piece.num_layers;
        std::vector<Part> found;
        for (const int64_t id : piece.block_ids)
            found.push_back({config_.blocks.base + id * config_.blocks.block_stride +
                                 layer_offsets_[piece.first_layer],
                             size});
        return found;
    }

    bool is_staged() const { return config_.pieces == MEMSERVE_STAGED; }
    int64_t block_bytes() const { return config_.row_bytes * config_.num_rows * config_.num_layers; }
    Event &end_of(int64_t number) { return ends_[number % config_.max_ahead]; }

    static void require(int code) {
        if (code != kSuccess && code != kInProgress) throw NcclError{code};
    }

    MemservePipeConfig config_;
    std::vector<int64_t> layer_offsets_, slot_layers_;
    std::vector<int32_t> slot_ids_;
    Stream copies_, passage_;
    Counter counter_{copies_};
    Event copied_[MEMSERVE_PIPE_SLOTS], passed_[MEMSERVE_PIPE_SLOTS];
    std::vector<Event> ends_; // of the pieces launched last
    std::deque<Piece> waiting_;
    bool is_launching_ = false; // the first of those
    MemservePipeCounts counts_ = {};
};

namespace {

// What `work` throws, as a code. Nothing is left for an unrelated call to find.
template <typename Work>
int told(int device, const Work &work) {
    const CurrentDevice current(device);
    int code = current.error();
    try {
        if (code == cudaSuccess) work();
    } catch (const CudaError &error) {
        code = error.code;
    } catch (const NcclError &) {
        code = cudaErrorUnknown;
    } catch (const std::bad_alloc &) {
        code = cudaErrorMemoryAllocation;
    }
    if (code != cudaSuccess) cudaGetLastError();
    return code;
}

template <typename Work>
int told(MemservePipe *pipe, MemservePipeCounts *counts, const Work &work) {
    const int code = told(pipe->device(), [&] {
        try {
            work();
        } catch (const NcclError &error) {
            pipe->note(error);
            throw;
        }
    });
    *counts = pipe->counts();
    return code;
}

} // namespace

int memserve_pipe_open(const MemservePipeConfig *config, MemservePipe **pipe) {
    if (config->max_ahead < 1 || config->pieces < MEMSERVE_STAGED || config->pieces > MEMSERVE_PAGES)
        return cudaErrorInvalidValue;
    return told(config->device, [&] { *pipe = new MemservePipe(*config); });
}

int memserve_pipe_put(MemservePipe *pipe, const int32_t *block_ids, const int32_t *chunk_sizes,
                      int32_t num_chunks, MemservePipeCounts *counts) {
    return told(pipe, counts, [&] { pipe->put(block_ids, chunk_sizes, num_chunks); });
}

int memserve_pipe_run(MemservePipe *pipe, int64_t finished, int watch, int64_t patience_us,
                      MemservePipeCounts *counts) {
    return told(pipe, counts,
                [&] { pipe->run(finished, watch, std::chrono::microseconds(patience_us)); });
}

int memserve_pipe_close(MemservePipe *pipe) {
    return told(pipe->device(), [&] {
        try {
            pipe->drain();
        } catch (const CudaError &) {
            delete pipe;
            throw;
        }
        delete pipe;
    });
}
