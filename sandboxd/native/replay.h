/* What is kept of one stream of a named command, so that a reader may come late, or again. */
#ifndef SANDBOXD_REPLAY_H
#define SANDBOXD_REPLAY_H

#include "buffer.h"

#include <stdint.h>
#include <sys/uio.h>

/* So many of the last bytes are kept. */
enum { REPLAY_BYTES = 1 << 20 };

struct piece {
    struct piece *next;
    uint64_t offset;
    struct buffer bytes;
};

/* The last bytes at their true offsets; what their command's limits dropped is a hole. Begins as {0}. */
struct replay {
    struct piece *first, *last;
    size_t held;  /* Bytes that are kept. */
    uint64_t end; /* The offset after the newest of them. */
};

/* The offset of the oldest byte that is kept. */
uint64_t replay_begin(const struct replay *replay);
/* Keeps data that begins at `offset`, and drops the oldest bytes past the limit. */
void replay_add(struct replay *replay, uint64_t offset, struct iovec data);
/* Offset and bytes of the oldest kept piece at or after `position`; false when there is none yet. */
bool replay_after(const struct replay *replay, uint64_t position, uint64_t *offset, struct iovec *bytes);
void replay_free(struct replay *replay);

#endif
