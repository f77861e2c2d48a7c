/* Reads lists of steps and carries them out. */
#include "steps.h"

#include "ops.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { ARGUMENTS = 5 };

/* In the order of backends/steps.py. Kinds: n a number, s a text, b bytes, d an open slot, f a slot
 * to fill. */
static const struct {
    const char *name, *takes;
    op *run;
} OPS[] = {
    {"block", "n", NULL},
    {"mkdir", "dsn", op_mkdir},
    {"makedirs", "s", op_makedirs},
    {"listen", "snf", op_listen},
    {"open", "dsnfn", op_open},
    {"write", "dssn", op_write},
    {"close", "f", op_close},
    {"workspace", "snn", op_workspace},
    {"chdir", "s", op_chdir},
    {"unshare", "n", op_unshare},
    {"mount", "sssns", op_mount},
    {"umount", "s", op_umount},
    {"chroot", "s", op_chroot},
    {"sethostname", "s", op_hostname},
    {"loopback", "", op_loopback},
    {"setrlimit", "nn", op_rlimit},
    {"setuser", "n", op_user},
    {"drop_bounding", "", op_bounding},
    {"drop_capabilities", "n", op_capabilities},
    {"prctl", "nn", op_prctl},
    {"keep", "b", op_keep},
    {"title", "s", op_title},
    {"setsid", "", op_setsid},
    {"alive", "d", op_alive},
    {"seccomp", "b", op_seccomp},
    {"key", "b", op_key},
    {"into", "d", op_into},
    {"join", "d", op_join},
    {"give", "ds", op_give},
    {"rename", "dss", op_rename},
};
enum { OP_BLOCK, OP_COUNT = sizeof OPS / sizeof *OPS };

struct reader {
    const unsigned char *at, *end;
};

static int take(struct reader *reader, void *into, size_t size) {
    if ((size_t)(reader->end - reader->at) < size)
        return EBADMSG;
    memcpy(into, reader->at, size);
    reader->at += size;
    return 0;
}

static int take_text(struct reader *reader, struct argument *argument) {
    uint16_t size;
    if (take(reader, &size, sizeof size) || reader->end - reader->at <= size || reader->at[size] != 0)
        return EBADMSG;
    argument->text = (const char *)reader->at;
    argument->size = size;
    reader->at += size + 1;
    return 0;
}

static int take_slot(const struct start *start, struct reader *reader, int filled,
                     struct argument *argument) {
    unsigned char slot;
    if (take(reader, &slot, 1) || slot >= SLOTS)
        return EBADMSG;
    if (filled && start->slots[slot] == -1)
        return EBADF;
    argument->number = slot;
    return 0;
}

static int take_arguments(const struct start *start, struct reader *reader, const char *takes,
                          struct argument *into) {
    int failed = 0;
    for (; *takes != 0 && !failed; takes++, into++) {
        if (*takes == 's' || *takes == 'b')
            failed = take_text(reader, into);
        else if (*takes == 'n')
            failed = take(reader, &into->number, sizeof into->number);
        else
            failed = take_slot(start, reader, *takes == 'd', into);
    }
    return failed;
}

/* Names the step and its texts, so that whoever reads of a failure knows at what. */
static void describe(struct start *start, unsigned char number, const struct argument *arguments) {
    size_t used = (size_t)snprintf(start->what, WHAT, "%s", OPS[number].name);
    for (const char *kind = OPS[number].takes; *kind != 0; kind++, arguments++)
        if (*kind == 's' && arguments->text && *arguments->text != 0 && used < WHAT)
            used += (size_t)snprintf(start->what + used, WHAT - used, " %s", arguments->text);
}

static int run_list(struct start *start, const unsigned char *steps, size_t size, int depth);

static int run_block(struct start *start, int64_t number, int depth) {
    if (number < 0 || number >= BLOCKS || !start->blocks[number].steps || depth >= DEPTH)
        return EBADMSG;
    return run_list(start, start->blocks[number].steps, start->blocks[number].size, depth + 1);
}

static int run_list(struct start *start, const unsigned char *steps, size_t size, int depth) {
    struct reader reader = {steps, steps + size};
    unsigned char number;
    while (take(&reader, &number, 1) == 0) {
        struct argument arguments[ARGUMENTS] = {0};
        if (number >= OP_COUNT) {
            snprintf(start->what, WHAT, "step %d", number);
            return EBADMSG;
        }
        int failed = take_arguments(start, &reader, OPS[number].takes, arguments);
        if (!failed && number == OP_BLOCK) {
            failed = run_block(start, arguments[0].number, depth);
            if (failed && failed != EBADMSG)
                return failed; /* Described where it failed. */
        } else if (!failed && OPS[number].run(start, arguments) != 0) {
            failed = errno;
        }
        if (failed) {
            describe(start, number, arguments);
            return failed;
        }
    }
    return 0;
}

int steps_run(struct start *start, const unsigned char *steps, size_t size) {
    return run_list(start, steps, size, 0);
}
