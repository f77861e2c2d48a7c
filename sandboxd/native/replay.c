/* What is kept of one stream of a named command, so that a reader may come late, or again. */
#include "replay.h"

#include "wire.h"

#include <stdlib.h>

uint64_t replay_begin(const struct replay *replay) {
    return replay->first != NULL ? replay->first->offset : replay->end;
}

static struct piece *append(struct replay *replay, uint64_t offset) {
    struct piece *piece = memory_get(sizeof *piece);
    piece->offset = offset;
    if (replay->last != NULL)
        replay->last->next = piece;
    else
        replay->first = piece;
    replay->last = piece;
    return piece;
}

static void drop_first(struct replay *replay) {
    struct piece *piece = replay->first;
    replay->first = piece->next;
    if (replay->first == NULL)
        replay->last = NULL;
    buffer_free(&piece->bytes);
    free(piece);
}

void replay_add(struct replay *replay, uint64_t offset, struct iovec data) {
    struct piece *piece = replay->last;
    if (piece == NULL || offset != replay->end || buffer_size(&piece->bytes) + data.iov_len > WIRE_PIECE)
        piece = append(replay, offset);
    buffer_add(&piece->bytes, data.iov_base, data.iov_len);
    replay->end = offset + data.iov_len;
    replay->held += data.iov_len;
    while (replay->held > REPLAY_BYTES) {
        size_t excess = replay->held - REPLAY_BYTES;
        struct piece *oldest = replay->first;
        if (buffer_size(&oldest->bytes) <= excess) {
            replay->held -= buffer_size(&oldest->bytes);
            drop_first(replay);
            continue;
        }
        buffer_take(&oldest->bytes, excess);
        oldest->offset += excess;
        replay->held -= excess;
    }
}

bool replay_after(const struct replay *replay, uint64_t position, uint64_t *offset, struct iovec *bytes) {
    for (const struct piece *piece = replay->first; piece != NULL; piece = piece->next) {
        size_t size = buffer_size(&piece->bytes);
        if (position >= piece->offset + size)
            continue;
        size_t skipped = position > piece->offset ? (size_t)(position - piece->offset) : 0;
        *offset = piece->offset + skipped;
        *bytes = (struct iovec){buffer_at(&piece->bytes) + skipped, size - skipped};
        return true;
    }
    return false;
}

void replay_free(struct replay *replay) {
    while (replay->first != NULL)
        drop_first(replay);
}
