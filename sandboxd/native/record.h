/* One named command: the last of what it told, and who reads it. It is held up by none of them. */
#ifndef SANDBOXD_RECORD_H
#define SANDBOXD_RECORD_H

#include "named.h"
#include "replay.h"

struct follower;

struct record {
    struct outlet outlet;
    struct named *named;
    struct record *before, *after; /* Among the listed. */
    struct command *command;       /* Until the end. */
    struct replay streams[2];
    struct follower *followers;
    char *id, *ending; /* The payload of the EXITED frame, once there was an end. */
    size_t id_length, ending_length;
    uint32_t pid;
    unsigned holders; /* The list, the command and each follower. */
    bool started, listed;
    bool resumable; /* its caller's own, kept for the case that the daemon dies */
    bool cancelled; /* its caller left: whoever asks for its end is told that, not how it was killed */
};

/* A listed one, that nothing was started for yet. */
struct record *record_new(struct named *named, const char *id, size_t length);
/* One of the holders lets go. */
void record_release(struct record *record);
/* Ends the command if it runs. */
void record_abandon(struct record *record);
/* A frame for the command itself. False when it breaks the protocol. */
bool record_received(struct record *record, char kind, const char *payload, size_t size);
/* A connection that reads it from these offsets on. A command that it `holds` ends with it. */
void record_follow(struct record *record, struct peer *peer, const uint64_t *offsets, bool holds);

/* Puts it at the end of the list, or takes it off. */
void named_append(struct named *named, struct record *record);
void named_remove(struct named *named, struct record *record);
/* Ends the command of a caller that left. */
void record_cancel(struct record *record);
/* It has ended: makes room for it, if it was not forgotten before. */
void named_ended(struct named *named, struct record *record);

#endif
