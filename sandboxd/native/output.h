/* What is told of a command's output: all of it, what fits a limit, or its head and its tail. */
#ifndef SANDBOXD_OUTPUT_H
#define SANDBOXD_OUTPUT_H

#include "buffer.h"

#include <stdint.h>

/* The bytes that both streams of a command together may still send. With a `tail` the command goes on past
 * them, and so many of each stream's last bytes are kept. */
struct budget {
    int64_t left; /* Negative: no limit. */
    size_t tail;
};

/* One stream on its way out; its offsets count what is dropped, too. Begins as {0}. */
struct trimmer {
    uint64_t offset;
    struct buffer tail;
};

struct trimmed {
    uint64_t offset; /* Of the data. */
    size_t kept;     /* So much of its begin is to be sent. */
    bool too_much;   /* The command has written more than it may. */
};

struct trimmed trim(struct trimmer *trimmer, struct budget *budget, const char *data, size_t size);
/* The offset of the tail. */
uint64_t trim_tail_offset(const struct trimmer *trimmer);

#endif
