/* Memory of a GPU that other processes of this host can map: the C interface of device_memory.cu.
 *
 * The owner allocates and exports; the handle travels as bytes; a peer opens it on its own device and
 * gets an address in its own address space. Opening a handle again gives the same address, and as
 * many closes are needed. A process cannot open a handle of its own.
 *
 * All functions return 0 or a CUDA error code and leave the current device as it was.
 */
#ifndef MEMSERVE_DEVICE_MEMORY_H
#define MEMSERVE_DEVICE_MEMORY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEMSERVE_IPC_HANDLE_BYTES 64

/* An allocation of its own, not a part of a larger one: the export covers exactly this memory. */
__attribute__((visibility("default"))) int memserve_allocate(int device, int64_t size_bytes,
                                                             uint64_t *address);
__attribute__((visibility("default"))) int memserve_free(int device, uint64_t address);

/* `handle`: MEMSERVE_IPC_HANDLE_BYTES bytes. */
__attribute__((visibility("default"))) int memserve_ipc_export(int device, uint64_t address,
                                                               uint8_t *handle);
__attribute__((visibility("default"))) int memserve_ipc_open(int device, const uint8_t *handle,
                                                             uint64_t *address);
__attribute__((visibility("default"))) int memserve_ipc_close(int device, uint64_t address);

#ifdef __cplusplus
}
#endif
#endif
