/* Who a command runs as where its caller names a user: found in the sandbox's own files, as docker(1) finds
 * it. Only the guest of a sandbox whose commands may have users has the rights to become one. */
#ifndef SANDBOXD_IDENTITY_H
#define SANDBOXD_IDENTITY_H

#include "fault.h"

#include <stddef.h>
#include <sys/types.h>

enum { IDENTITY_GROUPS = 256 };

/* Looks whether this process has such rights, before any of the others. */
void identity_open(void);

struct identity {
    bool given; /* False: who this process is. */
    uid_t user;
    gid_t groups[IDENTITY_GROUPS]; /* The first is its own. */
    size_t group_count;
    char *home; /* HOME=… */
};

/* Who is meant by `name`, `uid`, `name:group` or `uid:gid`, words and numbers as one likes; NULL: nobody else
 * than this process. False with the fault; nothing is held then. */
bool identity_find(struct identity *identity, const char *user, struct fault *fault);
void identity_free(struct identity *identity);

/* From here on to `identity_take_off` the pipes and terminals that this process makes belong to that user,
 * who could not open them anew otherwise. False where it may not, and then nothing has changed;
 * `death_signal` is for the way back. */
bool identity_put_on(const struct identity *identity, int *death_signal);
void identity_take_off(const struct identity *identity, int death_signal);

/* Becomes that user for good, and gives up every right to become another, or to end what is another's. Only
 * makes system calls. False with errno. */
bool identity_become(const struct identity *identity);
/* After a process on this one's memory has become somebody: nobody may read or trace this memory, whatever
 * the kernel then made of it. */
void identity_close(const struct identity *identity);

#endif
