/* File operations as the daemon asks for them, and data in frames, either way. */
#include "transfer.h"

#include "files.h"
#include "tar.h"
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct iovec NOTHING = {NULL, 0};

void transfer_failed(struct peer *peer, const struct fault *fault) {
    char number[4];
    wire_put32(number, (uint32_t)fault->number);
    peer->operation = &operation_over;
    peer_send(peer, WIRE_ERROR, (struct iovec){number, sizeof number},
              (struct iovec){(char *)fault->text, strlen(fault->text)});
}

void transfer_done(struct peer *peer, uint64_t count) {
    char number[8];
    wire_put64(number, count);
    peer->operation = &operation_over;
    peer_send(peer, WIRE_DONE, (struct iovec){number, sizeof number}, NOTHING);
}

static void nothing(struct operation *operation) {
    (void)operation;
}

/* -- to the daemon */

struct sender {
    struct operation operation;
    struct peer *peer;
    struct giver *giver;
};

static bool sender_received(struct operation *operation, char kind, const char *payload, size_t size) {
    (void)operation, (void)kind, (void)payload, (void)size;
    return false;
}

static void sender_closed(struct operation *operation) {
    struct sender *sender = (struct sender *)operation;
    if (sender->giver != NULL)
        sender->giver->kind->close(sender->giver);
    loop_bury(sender->peer->loop, sender, free);
}

static void sender_drained(struct operation *operation) {
    struct sender *sender = (struct sender *)operation;
    struct peer *peer = sender->peer;
    struct buffer piece = {0};
    struct fault fault;
    if (sender->giver == NULL)
        return;
    enum step step = sender->giver->kind->next(sender->giver, &piece, &fault);
    if (step != STEP_PIECE) {
        peer->want_drained = false;
        sender->giver->kind->close(sender->giver);
        sender->giver = NULL;
    }
    if (step == STEP_FAULT) {
        sender_closed(operation);
        transfer_failed(peer, &fault);
    } else if (step == STEP_END || buffer_size(&piece) != 0) {
        peer_send(peer, WIRE_DATA, (struct iovec){buffer_at(&piece), buffer_size(&piece)}, NOTHING);
    }
    buffer_free(&piece);
}

static const struct operation_kind SENDER = {sender_received, sender_drained, sender_closed};

void transfer_send(struct peer *peer, struct giver *giver) {
    struct sender *sender = memory_get(sizeof *sender);
    *sender = (struct sender){{&SENDER}, peer, giver};
    peer->operation = &sender->operation;
    peer->want_drained = true;
}

/* -- from the daemon */

struct receiver {
    struct operation operation;
    struct peer *peer;
    struct sink *sink;
};

static void receiver_closed(struct operation *operation) {
    struct receiver *receiver = (struct receiver *)operation;
    receiver->sink->kind->close(receiver->sink);
    loop_bury(receiver->peer->loop, receiver, free);
}

static bool receiver_received(struct operation *operation, char kind, const char *payload, size_t size) {
    struct receiver *receiver = (struct receiver *)operation;
    struct peer *peer = receiver->peer;
    struct sink *sink = receiver->sink;
    struct fault fault;
    uint64_t count = 0;
    if (kind != WIRE_DATA)
        return false;
    bool last = size == 0;
    bool done =
        last ? sink->kind->finish(sink, &count, &fault) : sink->kind->feed(sink, payload, size, &fault);
    if (done && !last)
        return true;
    receiver_closed(operation);
    if (done)
        transfer_done(peer, count);
    else
        transfer_failed(peer, &fault);
    return true;
}

static const struct operation_kind RECEIVER = {receiver_received, nothing, receiver_closed};

/* `sink` is NULL when it could not be made. */
static void receive(struct peer *peer, struct sink *sink, const struct fault *fault) {
    if (sink == NULL) {
        transfer_failed(peer, fault);
        return;
    }
    struct receiver *receiver = memory_get(sizeof *receiver);
    *receiver = (struct receiver){{&RECEIVER}, peer, sink};
    peer->operation = &receiver->operation;
}

/* -- the request */

static size_t fields_of(char kind) {
    switch (kind) {
    case WIRE_WRITE:
        return 4;
    case WIRE_READ:
        return WIRE_READ_FIELDS;
    case WIRE_REMOVE:
        return 1;
    default:
        return 0;
    }
}

/* The operation on a path, which it copies. */
static void begin(struct peer *peer, char kind, const char *fields, const char *path) {
    struct fault fault;
    switch (kind) {
    case WIRE_WRITE:
        receive(peer, file_write(path, wire_get32(fields), &fault), &fault);
        break;
    case WIRE_UNPACK:
        receive(peer, tar_unpack(path, &fault), &fault);
        break;
    case WIRE_READ:
        transfer_send(peer, file_read(path, wire_get64(fields), (int64_t)wire_get64(fields + 8)));
        break;
    case WIRE_REMOVE:
        transfer_send(peer, file_remove(path, fields[0] != 0));
        break;
    case WIRE_STAT:
        transfer_send(peer, file_describe(path));
        break;
    case WIRE_LIST:
        transfer_send(peer, file_list(path));
        break;
    default:
        transfer_send(peer, tar_pack(path));
    }
}

bool transfer_begin(struct peer *peer, char kind, const char *payload, size_t size) {
    static const char KINDS[] = {WIRE_WRITE, WIRE_READ,   WIRE_STAT, WIRE_LIST,
                                 WIRE_REMOVE, WIRE_PACK, WIRE_UNPACK};
    size_t fields = fields_of(kind);
    if (memchr(KINDS, kind, sizeof KINDS) == NULL || size <= fields)
        return false;
    if (memchr(payload + fields, 0, size - fields) != NULL) {
        struct fault fault;
        fault_say(&fault, EINVAL, "a path with a NUL byte");
        transfer_failed(peer, &fault);
        return true;
    }
    char *path = memory_copy(payload + fields, size - fields);
    begin(peer, kind, payload, path);
    free(path);
    return true;
}
