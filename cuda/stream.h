/* Streams that nobody else uses: the C interface of stream.cu.
 *
 * torch hands its streams out of a pool of 32 in turn, so that two users may get the same one. Two
 * kernels that wait for another GPU must not share a stream: the one in front may be waiting for what
 * the other GPU does only after the one behind it.
 *
 * Both functions return 0 or a CUDA error code and leave the current device as it was.
 */
#ifndef MEMSERVE_STREAM_H
#define MEMSERVE_STREAM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of the highest priority, and not synchronised with the default stream. */
__attribute__((visibility("default"))) int memserve_stream_create(int device, uint64_t *stream);

/* Nothing may be queued on it any more. */
__attribute__((visibility("default"))) int memserve_stream_destroy(int device, uint64_t stream);

#ifdef __cplusplus
}
#endif
#endif
