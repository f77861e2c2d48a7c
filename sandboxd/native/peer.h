/* One connection of the daemon: frames in, frames out, never more in memory than one of each. */
#ifndef SANDBOXD_PEER_H
#define SANDBOXD_PEER_H

#include "buffer.h"
#include "loop.h"

#include <sys/uio.h>

struct peer;
struct operation;

/* What a connection is for; a frame chooses it, the first one and any later that names another. */
struct operation_kind {
    /* Takes one more frame. False when that breaks the protocol, which ends the connection. */
    bool (*received)(struct operation *operation, char kind, const char *payload, size_t size);
    /* All that was sent has left. */
    void (*drained)(struct operation *operation);
    /* The daemon has let go of it, with the connection or for the next: ends what it was for, and itself. */
    void (*closed)(struct operation *operation);
};

/* The first member of each operation. */
struct operation {
    const struct operation_kind *kind;
};

/* One that is over: it lets all that still comes fall. */
extern struct operation operation_over;

/* Sets the operation that a first frame names, or none, so that another may follow. False: malformed. */
typedef bool begin_call(void *context, struct peer *peer, char kind, const char *payload, size_t size);

struct peer {
    struct loop *loop;
    begin_call *begin;
    void *context;
    struct operation *operation; /* NULL before the first frame. */
    struct buffer received, pending;
    uint32_t mask;
    int fd;
    bool paused;       /* Nothing more is read. */
    bool want_drained; /* `drained` is called whenever the socket takes more. */
    bool broken;       /* It ends as soon as nobody uses it. */
    bool taking;       /* Frames are being handed out. */
};

/* Serves an accepted socket until one side ends the connection; closes it where it cannot be watched. */
void peer_open(struct loop *loop, int fd, begin_call *begin, void *context);
/* True while the daemon has not taken what was sent before. */
bool peer_congested(const struct peer *peer);
/* Sends a frame whose payload is `head` and `body`: now what the socket takes, the rest when it can. */
void peer_send(struct peer *peer, char kind, struct iovec head, struct iovec body);
/* Stops reading, or takes frames again, those that have come already first. */
void peer_pause(struct peer *peer);
void peer_resume(struct peer *peer);
/* Makes the loop watch for what is wanted now. */
void peer_update(struct peer *peer);

#endif
