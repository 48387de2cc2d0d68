/* Copies of KV blocks between two buffers, in one pass: the C interface of block_copy.cu.
 *
 * Row r of layer l of block b lies at
 *
 *     base + layer_offsets[l] + b * block_stride + r * row_stride        (row_bytes long)
 *
 * on either side, and the two sides may differ in all of it. That covers
 *
 *     copy      blocks of one pool into blocks of another, whatever their layouts
 *     gather    the target is contiguous staging memory: block_ids = 0, 1, 2, ...
 *     scatter   the source is
 *     swap      one side is pinned host memory
 *     slice     rows are the heads that both sides share (tensor parallelism that differs)
 *
 * Addresses are device addresses of the launching device: own memory, a peer's memory mapped there,
 * or pinned host memory. All arrays are host memory and are read before the call returns. Nothing is checked against the size of any buffer: that is
 * the caller's part (memserve/ops/blocks.py). No call waits for the device.
 */
#ifndef MEMSERVE_BLOCK_COPY_H
#define MEMSERVE_BLOCK_COPY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEMSERVE_API __attribute__((visibility("default")))

typedef struct {
    uint64_t base;
    int64_t block_stride;
    int64_t row_stride;
    const int64_t *layer_offsets; /* [num_layers] */
    const int32_t *block_ids;     /* [num_blocks] */
} MemserveSide;

typedef struct {
    MemserveSide source;
    MemserveSide target;
    int64_t row_bytes;
    int32_t num_rows; /* of one layer of one block */
    int32_t num_layers;
    int32_t num_blocks;
    /* Device memory by which the bulk kernel's CTAs share the work as they get on. Zero before the
     * first copy and again after each; for one stream alone. Null: the work is dealt out evenly. */
    uint32_t *counter;
} MemserveCopy;

typedef enum {
    MEMSERVE_AUTO = 0,   /* the bulk kernel where it can run, else the vector kernel */
    MEMSERVE_VECTOR = 1, /* 16-byte loads and stores; any alignment and size */
    MEMSERVE_BULK = 2,   /* the SM's bulk copy unit; Hopper or newer, all of it 16-byte aligned */
    MEMSERVE_COPIES = 3, /* copy engines, one call per contiguous run */
    MEMSERVE_BATCH = 4   /* copy engines, one call for all runs */
} MemserveMethod;

/* Queue the copies on `stream` of `device`. Kernels use at most `max_sms` multiprocessors.
 *
 * MEMSERVE_BATCH works as MEMSERVE_COPIES on the legacy stream and before CUDA 13. No target row may
 * be written twice or be a source row as well. Returns 0 or a CUDA error code:
 * cudaErrorInvalidValue for counts below zero, max_sms below one or a method that cannot do it.
 */
MEMSERVE_API int memserve_copy_blocks(const MemserveCopy *copy, int method, int max_sms, int device,
                                      void *stream);

/* Let kernels on `device` reach memory of `peer`; no error if they already can. */
MEMSERVE_API int memserve_enable_peer_access(int device, int peer);

/* Name and meaning of an error code; valid for the life of the process. */
MEMSERVE_API const char *memserve_error_name(int code);
MEMSERVE_API const char *memserve_error_text(int code);

#ifdef __cplusplus
}
#endif
#endif
