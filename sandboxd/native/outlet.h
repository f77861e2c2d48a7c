/* Where what a command tells goes. */
#ifndef SANDBOXD_OUTLET_H
#define SANDBOXD_OUTLET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct outlet;

struct outlet_kind {
    /* True while no more output may come. */
    bool (*congested)(struct outlet *outlet);
    /* It runs, and this is its process: the first that is told. */
    void (*started)(struct outlet *outlet, uint32_t pid);
    /* A piece of the stream `kind`, of at most WIRE_PIECE bytes. */
    void (*output)(struct outlet *outlet, char kind, uint64_t offset, struct iovec data);
    /* It ended or could not be started, as this payload of an EXITED frame says: the last that is told. */
    void (*ended)(struct outlet *outlet, struct iovec payload);
    /* Whether its input waits, because the command does not read it. */
    void (*hold_input)(struct outlet *outlet, bool full);
};

/* The first member of each outlet. */
struct outlet {
    const struct outlet_kind *kind;
};

/* One that hears nothing and holds up nothing. */
extern struct outlet outlet_none;

#endif
