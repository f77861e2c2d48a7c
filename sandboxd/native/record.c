/* One named command: the last of what it told, and who reads it. */
#include "record.h"

#include "wire.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* One connection that reads a named command, from a place of its own in each stream. What it does not take in
 * time it misses: it goes on with the oldest that is kept. */
struct follower {
    struct operation operation;
    struct follower *next;
    struct peer *peer;
    struct record *record;
    uint64_t positions[2];
    int turn; /* The stream that is told next if it has anything. */
    bool holds, told_start, told_end;
};

static const struct outlet_kind OUTLET;
static const char KINDS[2] = {WIRE_STDOUT, WIRE_STDERR};

struct record *record_new(struct named *named, const char *id, size_t length) {
    struct record *record = memory_get(sizeof *record);
    *record = (struct record){.outlet = {&OUTLET}, .named = named, .holders = 1};
    record->id = memory_copy(id, length);
    record->id_length = length;
    named_append(named, record);
    return record;
}

static void release(void *object) {
    struct record *record = object;
    for (int n = 0; n < 2; n++)
        replay_free(&record->streams[n]);
    free(record->ending);
    free(record->id);
    free(record);
}

void record_release(struct record *record) {
    if (--record->holders == 0)
        loop_bury(record->named->commands->loop, record, release);
}

void record_abandon(struct record *record) {
    if (record->command != NULL)
        command_abandon(record->command);
}

void record_cancel(struct record *record) {
    record->cancelled = record->command != NULL;
    record_abandon(record);
}

bool record_received(struct record *record, char kind, const char *payload, size_t size) {
    return record->command == NULL || command_received(record->command, kind, payload, size);
}

/* -- who reads it */

/* Tells what is next; false while there is nothing. */
static bool tell_next(struct follower *follower) {
    struct record *record = follower->record;
    struct peer *peer = follower->peer;
    const struct iovec nothing = {NULL, 0};
    char number[8];
    if (record->started && !follower->told_start) {
        follower->told_start = true;
        wire_put32(number, record->pid);
        peer_send(peer, WIRE_STARTED, (struct iovec){number, 4}, nothing);
        return true;
    }
    for (int n = 0; n < 2; n++) {
        int stream = (follower->turn + n) % 2;
        uint64_t offset;
        struct iovec bytes;
        if (!replay_after(&record->streams[stream], follower->positions[stream], &offset, &bytes))
            continue;
        follower->positions[stream] = offset + bytes.iov_len;
        /* The other stream is next, so that neither waits for the end of the other. */
        follower->turn = 1 - stream;
        wire_put64(number, offset);
        peer_send(peer, KINDS[stream], (struct iovec){number, 8}, bytes);
        return true;
    }
    if (record->ending == NULL || follower->told_end)
        return false;
    follower->told_end = true;
    if (record->cancelled) {
        wire_put32(number, ECANCELED);
        peer_send(peer, WIRE_ERROR, (struct iovec){number, 4}, nothing);
        return true;
    }
    peer_send(peer, WIRE_EXITED, (struct iovec){record->ending, record->ending_length}, nothing);
    return true;
}

/* Sends on what the connection takes. */
static void follower_drained(struct operation *operation) {
    struct follower *follower = (struct follower *)operation;
    while (!peer_congested(follower->peer) && tell_next(follower))
        continue;
}

static bool follower_received(struct operation *operation, char kind, const char *payload, size_t size) {
    struct record *record = ((struct follower *)operation)->record;
    if (kind != WIRE_FORGET)
        return record_received(record, kind, payload, size);
    record_cancel(record);
    return true;
}

static void follower_closed(struct operation *operation) {
    struct follower *follower = (struct follower *)operation;
    struct record *record = follower->record;
    struct follower **place = &record->followers;
    while (*place != follower)
        place = &(*place)->next;
    *place = follower->next;
    if (follower->holds)
        record_abandon(record);
    record_release(record);
    loop_bury(follower->peer->loop, follower, free);
}

static const struct operation_kind FOLLOWER = {follower_received, follower_drained, follower_closed};

void record_follow(struct record *record, struct peer *peer, const uint64_t *offsets, bool holds) {
    struct follower *follower = memory_get(sizeof *follower);
    *follower = (struct follower){.operation = {&FOLLOWER}, .peer = peer, .record = record, .holds = holds};
    memcpy(follower->positions, offsets, sizeof follower->positions);
    record->holders++;
    /* At the end: each is told in the order of its coming. */
    struct follower **place = &record->followers;
    while (*place != NULL)
        place = &(*place)->next;
    *place = follower;
    peer->operation = &follower->operation;
    follower_drained(&follower->operation);
}

/* -- what the command tells */

static void tell_all(struct record *record) {
    for (struct follower *follower = record->followers; follower != NULL; follower = follower->next)
        follower_drained(&follower->operation);
}

static bool congested(struct outlet *outlet) {
    (void)outlet;
    return false;
}

static void started(struct outlet *outlet, uint32_t pid) {
    struct record *record = (struct record *)outlet;
    record->started = true;
    record->pid = pid;
}

static void output(struct outlet *outlet, char kind, uint64_t offset, struct iovec data) {
    struct record *record = (struct record *)outlet;
    replay_add(&record->streams[kind == WIRE_STDOUT ? 0 : 1], offset, data);
    tell_all(record);
}

static void ended(struct outlet *outlet, struct iovec payload) {
    struct record *record = (struct record *)outlet;
    record->ending = memory_copy(payload.iov_base, payload.iov_len);
    record->ending_length = payload.iov_len;
    record->holders++; /* Until this is told. */
    if (record->command != NULL) {
        command_leave(record->command);
        record->command = NULL;
        record_release(record);
    }
    tell_all(record);
    named_ended(record->named, record);
    record_release(record);
}

static void hold_input(struct outlet *outlet, bool full) {
    (void)outlet, (void)full;
}

static const struct outlet_kind OUTLET = {congested, started, output, ended, hold_input};
