/* One connection of the daemon: frames in, frames out, never more in memory than one of each. */
#include "peer.h"

#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void ready(void *context, uint32_t mask);

static bool over_received(struct operation *operation, char kind, const char *payload, size_t size) {
    (void)operation, (void)payload, (void)size;
    return kind == WIRE_DATA || kind == WIRE_STDIN || kind == WIRE_SIGNAL || kind == WIRE_RESIZE;
}

static void nothing(struct operation *operation) {
    (void)operation;
}

static const struct operation_kind OVER = {over_received, nothing, nothing};
struct operation operation_over = {&OVER};

void peer_open(struct loop *loop, int fd, begin_call *begin, void *context) {
    struct peer *peer = memory_get(sizeof *peer);
    *peer = (struct peer){.loop = loop, .begin = begin, .context = context, .mask = LOOP_IN, .fd = fd};
    if (loop_watch(loop, fd, LOOP_IN, ready, peer))
        return;
    close(fd);
    free(peer);
}

static void release(void *object) {
    struct peer *peer = object;
    buffer_free(&peer->received);
    buffer_free(&peer->pending);
    free(peer);
}

static void end(struct peer *peer) {
    loop_unwatch(peer->loop, peer->fd);
    close(peer->fd);
    peer->fd = -1;
    struct operation *operation = peer->operation;
    peer->operation = NULL;
    if (operation != NULL)
        operation->kind->closed(operation);
    loop_bury(peer->loop, peer, release);
}

bool peer_congested(const struct peer *peer) {
    return buffer_size(&peer->pending) != 0;
}

void peer_update(struct peer *peer) {
    if (peer->fd < 0)
        return;
    uint32_t mask = peer->paused ? 0 : LOOP_IN;
    if (peer_congested(peer) || peer->want_drained)
        mask |= LOOP_OUT;
    if (mask == peer->mask)
        return;
    peer->mask = mask;
    loop_watch(peer->loop, peer->fd, mask, ready, peer);
}

/* Whoever is at it still uses the connection: the hang-up comes back through the loop. */
static void give_up(struct peer *peer) {
    peer->broken = true;
    shutdown(peer->fd, SHUT_RDWR);
}

/* -- sending */

static void keep(struct buffer *pending, const struct iovec *part, size_t sent) {
    if (sent < part->iov_len)
        buffer_add(pending, (const char *)part->iov_base + sent, part->iov_len - sent);
}

void peer_send(struct peer *peer, char kind, struct iovec head, struct iovec body) {
    if (peer->fd < 0)
        return;
    char header[WIRE_HEADER] = {kind};
    wire_put32(header + 1, (uint32_t)(head.iov_len + body.iov_len));
    struct iovec parts[3] = {{header, sizeof header}, head, body};
    size_t sent = 0;
    if (!peer_congested(peer)) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
        ssize_t count = sendmsg(peer->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN && errno != EINTR) {
            give_up(peer); /* Also for want of memory: a frame must not be missing between others. */
            return;
        }
        sent = count > 0 ? (size_t)count : 0;
    }
    for (int n = 0; n < 3; n++) {
        keep(&peer->pending, &parts[n], sent);
        sent -= sent < parts[n].iov_len ? sent : parts[n].iov_len;
    }
    peer_update(peer);
}

/* False when the connection is broken. */
static bool flush(struct peer *peer) {
    if (peer_congested(peer)) {
        size_t size = buffer_size(&peer->pending);
        ssize_t sent = send(peer->fd, buffer_at(&peer->pending), size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0)
            return errno == EAGAIN || errno == EINTR;
        buffer_take(&peer->pending, (size_t)sent);
    }
    if (!peer_congested(peer) && peer->operation != NULL)
        peer->operation->kind->drained(peer->operation);
    peer_update(peer);
    return true;
}

/* -- receiving */

/* A frame that names what a connection is for. FORGET without an id is a word to what it is for already. */
static bool names_operation(char kind, size_t size) {
    static const char KINDS[] = {WIRE_EXEC, WIRE_START, WIRE_ATTACH, WIRE_SEND_SIGNAL, WIRE_COMMANDS,
                                 WIRE_READ, WIRE_WRITE, WIRE_STAT, WIRE_LIST, WIRE_REMOVE,
                                 WIRE_PACK, WIRE_UNPACK, WIRE_PING, WIRE_WATCH};
    return kind == WIRE_FORGET ? size != 0 : memchr(KINDS, kind, sizeof KINDS) != NULL;
}

/* The daemon keeps a connection for the next operation, and so lets go of the one before. */
static void let_go(struct peer *peer) {
    struct operation *operation = peer->operation;
    peer->operation = NULL;
    peer->want_drained = false;
    operation->kind->closed(operation);
}

/* Hands out the frames that have come whole. False when one is malformed. */
static bool take_frames(struct peer *peer) {
    /* A frame's operation may ask for more while it has that frame: the loop below goes on by itself. */
    if (peer->taking)
        return true;
    bool right = true;
    peer->taking = true;
    while (right && !peer->paused && buffer_size(&peer->received) >= WIRE_HEADER) {
        const char *frame = buffer_at(&peer->received);
        size_t size = wire_get32(frame + 1);
        if (size > WIRE_MAX_REQUEST) {
            right = false;
            break;
        }
        if (buffer_size(&peer->received) < WIRE_HEADER + size)
            break;
        if (peer->operation != NULL && names_operation(frame[0], size))
            let_go(peer);
        if (peer->operation == NULL)
            right = peer->begin(peer->context, peer, frame[0], frame + WIRE_HEADER, size);
        else
            right = peer->operation->kind->received(peer->operation, frame[0], frame + WIRE_HEADER, size);
        buffer_take(&peer->received, WIRE_HEADER + size);
    }
    peer->taking = false;
    peer_update(peer);
    return right;
}

static bool receive(struct peer *peer) {
    static char piece[WIRE_PIECE];
    ssize_t count = recv(peer->fd, piece, sizeof piece, MSG_DONTWAIT);
    if (count < 0)
        return errno == EAGAIN || errno == EINTR;
    buffer_add(&peer->received, piece, (size_t)count);
    return count != 0 && take_frames(peer);
}

void peer_pause(struct peer *peer) {
    peer->paused = true;
    peer_update(peer);
}

void peer_resume(struct peer *peer) {
    if (peer->fd < 0)
        return; /* It ends: frames that wait may begin nothing that nobody would end. */
    peer->paused = false;
    if (!take_frames(peer))
        give_up(peer);
}

static void ready(void *context, uint32_t mask) {
    struct peer *peer = context;
    bool alive = !peer->broken;
    if (alive && (mask & LOOP_OUT) != 0)
        alive = flush(peer);
    if (alive && (mask & LOOP_IN) != 0 && !peer->paused)
        alive = receive(peer);
    else if ((mask & LOOP_GONE) != 0)
        alive = false;
    if (!alive || peer->broken)
        end(peer);
}
