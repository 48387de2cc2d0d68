// Device memory that other processes map by CUDA IPC. See device_memory.h.
#include "device_memory.h"

#include <cstring>

#include <cuda_runtime.h>

#include "current_device.cuh"

static_assert(sizeof(cudaIpcMemHandle_t) == MEMSERVE_IPC_HANDLE_BYTES, "the handle's size is ours");

namespace {

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

// The error is told to the caller, and must not turn up again at an unrelated call.
int told(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

} // namespace

int memserve_allocate(int device, int64_t size_bytes, uint64_t *address) {
    if (size_bytes <= 0) return cudaErrorInvalidValue;
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    void *memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(size_bytes));
    *address = reinterpret_cast<uint64_t>(memory);
    return told(error);
}

int memserve_free(int device, uint64_t address) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    return told(cudaFree(pointer(address)));
}

int memserve_ipc_export(int device, uint64_t address, uint8_t *handle) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    cudaIpcMemHandle_t exported;
    const cudaError_t error = cudaIpcGetMemHandle(&exported, pointer(address));
    if (error == cudaSuccess) std::memcpy(handle, &exported, sizeof exported);
    return told(error);
}

int memserve_ipc_open(int device, const uint8_t *handle, uint64_t *address) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    cudaIpcMemHandle_t imported;
    std::memcpy(&imported, handle, sizeof imported);
    void *memory = nullptr;
    const cudaError_t error =
        cudaIpcOpenMemHandle(&memory, imported, cudaIpcMemLazyEnablePeerAccess);
    *address = reinterpret_cast<uint64_t>(memory);
    return told(error);
}

int memserve_ipc_close(int device, uint64_t address) {
    const CurrentDevice current(device);
    if (current.error() != cudaSuccess) return told(current.error());
    return told(cudaIpcCloseMemHandle(pointer(address)));
}
