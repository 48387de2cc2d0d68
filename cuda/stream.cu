// Streams that nobody else uses. See stream.h.
#include "stream.h"

#include <cuda_runtime.h>

#include "current_device.cuh"

namespace {

// The error is told to the caller, and must not turn up again at an unrelated call.
int told(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

} // namespace

int memserve_stream_create(int device, uint64_t *stream) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error != cudaSuccess) return told(error);
    cudaStream_t made = nullptr;
    error = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest);
    *stream = reinterpret_cast<uint64_t>(made);
    return told(error);
}

int memserve_stream_destroy(int device, uint64_t stream) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    return told(cudaStreamDestroy(reinterpret_cast<cudaStream_t>(stream)));
}
