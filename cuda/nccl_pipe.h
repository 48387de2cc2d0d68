/* KV blocks through an NCCL communicator of two ranks: the C interface of nccl_pipe.cu.
 *
 *     sender      scattered blocks ─gather▶ slot ─send▶ communicator
 *     receiver    communicator ─receive▶ slot ─scatter▶ scattered blocks
 *
 * A transfer is cut into pieces, each of which passes through one of two slots of staging memory, in
 * turn, so that gathering the next, sending this one and scattering the last overlap. The host only
 * queues; it does so in here and not in Python, because each call there would have to get the
 * interpreter back from the engine's thread, which may keep it for milliseconds.
 *
 * NCCL is not linked: its functions are given by address, those of the library in the process. The
 * communicator is a non-blocking one, or a blocking one whose connections have been made, so that
 * nothing here waits for the other rank. No two threads call at once for a pipe.
 *
 * All functions return 0 or a CUDA error code and leave the current device as it was; an error of
 * NCCL's is cudaErrorUnknown, and its own code is in the counts.
 */
#ifndef MEMSERVE_NCCL_PIPE_H
#define MEMSERVE_NCCL_PIPE_H

#include <stddef.h>
#include <stdint.h>

#include "block_copy.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MEMSERVE_PIPE_SLOTS 2

typedef struct {
    int (*get_async_error)(void *communicator, int *error);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *data, size_t count, int type, int peer, void *communicator, void *stream);
    int (*receive)(void *data, size_t count, int type, int peer, void *communicator, void *stream);
} MemserveNccl;

typedef enum {
    MEMSERVE_STAGED = 0, /* a chunk is one piece, gathered and scattered */
    MEMSERVE_BLOCKS = 1, /* sent from where they are, a chunk in one launch; each block in one run */
    MEMSERVE_PAGES = 2   /* one launch for each layer of each block; each page in one run */
} MemservePieces;

typedef struct {
    MemserveNccl nccl;
    void *communicator;
    MemserveSide blocks; /* this rank's; without block ids */
    int64_t row_bytes;
    int32_t num_rows; /* of one layer of one block */
    int32_t num_layers;
    uint64_t slots[MEMSERVE_PIPE_SLOTS]; /* staging memory, each of slot_blocks blocks */
    int32_t slot_blocks;
    int32_t peer;
    int32_t is_sender;
    int32_t pieces;
    int32_t max_sms;   /* that a gather or a scatter may take */
    int32_t max_ahead; /* launches that have not left the communicator, at most */
    int32_t device;
} MemservePipeConfig;

typedef struct {
    int64_t put;      /* pieces, all told */
    int64_t launched; /* of those: given to the communicator */
    int64_t finished; /* of those: sent, or in the blocks */
    int32_t nccl_error;
} MemservePipeCounts;

typedef struct MemservePipe MemservePipe;

/* `config` is copied, its layer offsets as well. Both streams are the pipe's own and of the highest
 * priority: torch hands its streams out in turn, and two kernels that wait for another GPU must not
 * share one. */
MEMSERVE_API int memserve_pipe_open(const MemservePipeConfig *config, MemservePipe **pipe);

/* Queue a transfer: chunks of so many blocks each, in order. The arrays are copied. */
MEMSERVE_API int memserve_pipe_put(MemservePipe *pipe, const int32_t *block_ids,
                                   const int32_t *chunk_sizes, int32_t num_chunks,
                                   MemservePipeCounts *counts);

/* Go on until everything is launched and `finished` pieces have finished, or `watch` (a file
 * descriptor, or -1) can be read, or so many microseconds are over. */
MEMSERVE_API int memserve_pipe_run(MemservePipe *pipe, int64_t finished, int watch,
                                   int64_t patience_us, MemservePipeCounts *counts);

/* Wait for what is queued on the streams, and free the pipe. What is only put is forgotten. */
MEMSERVE_API int memserve_pipe_close(MemservePipe *pipe);

#ifdef __cplusplus
}
#endif
#endif
