/* Commands with an id: what is asked about them, and which of the ended ones are kept. */
#include "named.h"

#include "record.h"
#include "transfer.h"
#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Of the commands that have ended so many are kept. */
    ENDED_MOST = 64,
    /* With more output than this in all fewer are kept: it is memory of the sandbox. */
    ENDED_BYTES = 16 << 20,
    /* What nobody named is kept for the time of a daemon's restart alone. */
    RESUMABLE_MOST = 16,
    RESUMABLE_BYTES = 2 << 20,
};

bool named_is(char kind) {
    static const char KINDS[] = {WIRE_START, WIRE_ATTACH, WIRE_SEND_SIGNAL, WIRE_COMMANDS, WIRE_FORGET};
    return memchr(KINDS, kind, sizeof KINDS) != NULL;
}

/* -- the list */

void named_append(struct named *named, struct record *record) {
    record->before = named->last;
    record->after = NULL;
    if (named->last != NULL)
        named->last->after = record;
    else
        named->first = record;
    named->last = record;
    record->listed = true;
}

void named_remove(struct named *named, struct record *record) {
    if (record->before != NULL)
        record->before->after = record->after;
    else
        named->first = record->after;
    if (record->after != NULL)
        record->after->before = record->before;
    else
        named->last = record->before;
    record->listed = false;
}

static struct record *find(const struct named *named, const char *id, size_t length) {
    for (struct record *record = named->first; record != NULL; record = record->after)
        if (record->id_length == length && memcmp(record->id, id, length) == 0)
            return record;
    return NULL;
}

static size_t held(const struct record *record) {
    return record->streams[0].held + record->streams[1].held;
}

/* Drops the oldest of the ended ones of a kind, until so many and so much of them is left. */
static void keep_most(struct named *named, bool resumable, size_t most, size_t most_bytes) {
    size_t count = 0, bytes = 0;
    for (struct record *each = named->first; each != NULL; each = each->after)
        if (each->ending != NULL && each->resumable == resumable) {
            count++;
            bytes += held(each);
        }
    for (struct record *each = named->first, *after; each != NULL; each = after) {
        after = each->after;
        if (count <= most && bytes <= most_bytes)
            return;
        if (each->ending == NULL || each->resumable != resumable)
            continue;
        count--;
        bytes -= held(each);
        named_remove(named, each);
        record_release(each);
    }
}

void named_ended(struct named *named, struct record *record) {
    if (!record->listed)
        return;
    named_remove(named, record);
    named_append(named, record);
    if (record->resumable)
        keep_most(named, true, RESUMABLE_MOST, RESUMABLE_BYTES);
    else
        keep_most(named, false, ENDED_MOST, ENDED_BYTES);
}

/* -- listing */

struct listing {
    struct giver giver;
    struct buffer infos; /* As they were when they were asked for. */
};

static void add_info(struct buffer *infos, const struct record *record) {
    char fields[WIRE_NAMED_INFO_FIELDS] = {record->ending == NULL};
    for (int n = 0; n < 2; n++) {
        wire_put64(fields + 1 + 16 * n, replay_begin(&record->streams[n]));
        wire_put64(fields + 9 + 16 * n, record->streams[n].end);
    }
    fields[33] = (char)record->id_length;
    buffer_add(infos, fields, sizeof fields);
    buffer_add(infos, record->id, record->id_length);
}

static enum step listing_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct buffer *infos = &((struct listing *)giver)->infos;
    (void)fault;
    if (buffer_size(infos) == 0)
        return STEP_END;
    while (buffer_size(infos) != 0 && buffer_size(piece) < WIRE_PIECE) {
        size_t size = WIRE_NAMED_INFO_FIELDS + (unsigned char)buffer_at(infos)[33];
        buffer_add(piece, buffer_at(infos), size);
        buffer_take(infos, size);
    }
    return STEP_PIECE;
}

static void listing_close(struct giver *giver) {
    buffer_free(&((struct listing *)giver)->infos);
    free(giver);
}

static void list(const struct named *named, struct peer *peer) {
    static const struct giver_kind LISTING = {listing_next, listing_close};
    struct listing *listing = memory_get(sizeof *listing);
    listing->giver.kind = &LISTING;
    for (const struct record *record = named->first; record != NULL; record = record->after)
        if (!record->resumable)
            add_info(&listing->infos, record);
    transfer_send(peer, &listing->giver);
}

/* -- requests */

static bool refuse(struct peer *peer, int number, const char *text) {
    struct fault fault;
    fault_say(&fault, number, text);
    transfer_failed(peer, &fault);
    return true;
}

static bool begin_command(struct named *named, struct peer *peer, const char *payload, size_t size) {
    if (size < WIRE_NAMED_FIELDS)
        return false;
    size_t id_length = (unsigned char)payload[1], stdin_length = wire_get32(payload + 2);
    const char *id = payload + WIRE_NAMED_FIELDS;
    struct exec_request request;
    if (size - WIRE_NAMED_FIELDS < id_length + stdin_length ||
        !exec_request_read(&request, id + id_length + stdin_length,
                           size - WIRE_NAMED_FIELDS - id_length - stdin_length))
        return false;
    if (find(named, id, id_length) != NULL) {
        exec_request_free(&request);
        return refuse(peer, EEXIST, "the id is taken");
    }
    static const uint64_t from_the_begin[2];
    struct record *record = record_new(named, id, id_length);
    record->resumable = payload[0] == WIRE_RESUMABLE;
    /* What cannot be started has told its end by then. */
    struct command *command = command_start(named->commands, &request, &record->outlet);
    exec_request_free(&request);
    if (command != NULL) {
        record->command = command;
        record->holders++;
    }
    if (stdin_length != 0) {
        record_received(record, WIRE_STDIN, id + id_length, stdin_length);
        record_received(record, WIRE_STDIN, NULL, 0);
    }
    record_follow(record, peer, from_the_begin, payload[0] == WIRE_HELD);
    return true;
}

bool named_begin(struct named *named, struct peer *peer, char kind, const char *payload, size_t size) {
    size_t fields = kind == WIRE_ATTACH ? WIRE_ATTACH_FIELDS : kind == WIRE_SEND_SIGNAL ? 4 : 0;
    if (kind == WIRE_START)
        return begin_command(named, peer, payload, size);
    if (kind == WIRE_COMMANDS) {
        list(named, peer);
        return true;
    }
    if (size < fields)
        return false;
    struct record *record = find(named, payload + fields, size - fields);
    if (record == NULL)
        return refuse(peer, ENOENT, "no such command");
    if (kind == WIRE_ATTACH && record->cancelled)
        return refuse(peer, ECANCELED, "its caller left");
    if (kind == WIRE_ATTACH) {
        uint64_t offsets[2] = {wire_get64(payload), wire_get64(payload + 8)};
        record_follow(record, peer, offsets, false);
        return true;
    }
    if (kind == WIRE_SEND_SIGNAL) {
        if (!record_received(record, WIRE_SIGNAL, payload, 4))
            return false;
    } else {
        named_remove(named, record);
        record_abandon(record);
        record_release(record);
    }
    transfer_done(peer, 0);
    return true;
}
