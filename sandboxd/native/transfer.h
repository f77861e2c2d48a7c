/* File operations as the daemon asks for them, and data in frames, either way. */
#ifndef SANDBOXD_TRANSFER_H
#define SANDBOXD_TRANSFER_H

#include "fault.h"
#include "peer.h"

#include <stdint.h>

/* Gives data piece by piece, each in a step short enough for the loop. */
struct giver;
enum step { STEP_PIECE, STEP_END, STEP_FAULT };

struct giver_kind {
    /* Adds the next piece to `piece`; none at all means that there is nothing to send yet. */
    enum step (*next)(struct giver *giver, struct buffer *piece, struct fault *fault);
    /* No more is wanted; frees it. */
    void (*close)(struct giver *giver);
};

/* The first member of each giver. */
struct giver {
    const struct giver_kind *kind;
};

/* Takes data: `feed` as often as needed, then `finish`. */
struct sink;

struct sink_kind {
    bool (*feed)(struct sink *sink, const char *data, size_t size, struct fault *fault);
    /* It is complete. Tells how much there was. */
    bool (*finish)(struct sink *sink, uint64_t *count, struct fault *fault);
    /* No more comes, or it was finished; frees it. */
    void (*close)(struct sink *sink);
};

/* The first member of each sink. */
struct sink {
    const struct sink_kind *kind;
};

/* Begins the file operation that a first frame names. False when it names none or is malformed. */
bool transfer_begin(struct peer *peer, char kind, const char *payload, size_t size);
/* Sends what a giver gives; each piece when the one before has left, and an empty one at the end. */
void transfer_send(struct peer *peer, struct giver *giver);
/* Tells the daemon that the operation failed; what it still sends falls. */
void transfer_failed(struct peer *peer, const struct fault *fault);
/* Tells the daemon that the operation is done. */
void transfer_done(struct peer *peer, uint64_t count);

#endif
