/* The steps that a sandbox is made by: the launcher lists them (see backends/steps.py), the starter and the
 * new process carry them out in order. Which they are and why in that order is the launcher's affair; here
 * each is one call to the kernel or a few, and its failure ends the list. */
#ifndef SANDBOXD_STEPS_H
#define SANDBOXD_STEPS_H

#include <stddef.h>
#include <stdint.h>

/* Descriptors go by slots, whose numbers the launcher knows, too. */
enum slot {
    SLOT_HERE, /* the working directory */
    SLOT_LIFELINE,
    SLOT_LISTENER,
    SLOT_HOME, /* what the sandbox leaves on the host is in there, above all why it could not be made */
    SLOT_OOM_SCORE,
    SLOT_KILLS,
    SLOT_PEAK,
    SLOT_LIMIT,
    SLOT_FREE,
    SLOT_INHERITED = 12, /* from here on: the starter's own, in the order of its arguments */
    SLOTS = 20,
};

enum { BLOCKS = 16, DEPTH = 4, WHAT = 512 };

/* A list that many sandboxes share. */
struct block {
    const unsigned char *steps;
    size_t size;
};

/* One sandbox on its way: its open descriptors (-1: none), the shared lists, and what the step that failed
 * was about. */
struct start {
    int slots[SLOTS];
    int control;       /* the socket to the launcher */
    int group, joined; /* the control group that the new process begins in (-1: none), and whether it did */
    const struct block *blocks;
    char what[WHAT];
};

struct argument {
    int64_t number;   /* of a number or a slot */
    const char *text; /* of a text, which ends in a NUL beside */
    size_t size;
};

/* Carries out `size` bytes of steps. Returns 0, or the error number of the first that failed. */
int steps_run(struct start *start, const unsigned char *steps, size_t size);

#endif
