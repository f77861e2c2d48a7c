/* Commands with an id: they can outlive who started them, and any number of connections may read them. */
#ifndef SANDBOXD_NAMED_H
#define SANDBOXD_NAMED_H

#include "command.h"
#include "peer.h"

struct record;

/* Those that run, and those that have ended and are kept; the ended ones in the order of their ends. */
struct named {
    struct commands *commands;
    struct record *first, *last;
};

bool named_is(char kind);
/* Begins what a first frame asks about a named command. False when it is malformed; an id that is taken or
 * unknown the daemon is told. */
bool named_begin(struct named *named, struct peer *peer, char kind, const char *payload, size_t size);

#endif
