/* Starts a command's first process, joined to this one by pipes or a terminal and by nothing else. */
#ifndef SANDBOXD_SPAWN_H
#define SANDBOXD_SPAWN_H

#include "fault.h"
#include "identity.h"
#include "tree.h"
#include "wire.h"

/* Of what a command's process does on this process's memory, until its exec: it only makes system calls. Its
 * frames are left behind on a stack that the next child uses: no sanitizer may take marks of theirs for its
 * own. */
#define IN_CHILD __attribute__((no_sanitize_address))

/* What connects a command: its three descriptors, and this side's ends of them; -1 where there is none. */
struct ends {
    int null;      /* Shared: where nothing is to be read. */
    int theirs[3]; /* The child's, until it has them. */
    char terminal_name[32];
    int terminal; /* One of a terminal is both its input and its output. */
    int input;
    int outputs[2]; /* The second of a terminal is -1. */
};

struct spawner {
    int null;
    int oom_score_fd; /* -1: none. */
    char oom_score[16]; /* This process's own, as it was at the start. */
    struct tagger tagger;
    char *stack; /* Where the stack of a child ends, until it has a memory of its own. */
};

/* False when the system refuses. */
bool spawner_open(struct spawner *spawner, int oom_score_fd);
/* One command to start, and who it runs as. */
struct launch {
    const struct exec_request *request;
    const struct identity *identity;
};

/* Makes pipes or a terminal, which are that user's. False with the fault; nothing is open then. */
bool spawn_connect(const struct spawner *spawner, const struct launch *launch, struct ends *ends,
                   struct fault *fault);
/* Closes all of them. */
void spawn_disconnect(struct ends *ends);
/* Starts the program with its ends and closes the child's; with a fault returns -1, and all are open. */
pid_t spawn(struct spawner *spawner, const struct launch *launch, struct ends *ends, uint64_t *tag,
            struct fault *fault);
void terminal_resize(int terminal, uint16_t rows, uint16_t columns);

#endif
