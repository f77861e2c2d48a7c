/* Tar archives, as trees travel: ustar headers, with pax records for what does not fit into one. */
#ifndef SANDBOXD_TAR_H
#define SANDBOXD_TAR_H

#include "transfer.h"

enum {
    TAR_BLOCK = 512,
    TAR_REGULAR = '0', TAR_HARD_LINK = '1', TAR_SYMLINK = '2', TAR_DIRECTORY = '5', TAR_FIFO = '6',
    /* Extensions: what they say of the entry that follows them. */
    TAR_PAX = 'x', TAR_PAX_GLOBAL = 'g', TAR_GNU_NAME = 'L', TAR_GNU_LINK = 'K',
    /* The longest body of an extension; a path is at most 4096 bytes. */
    TAR_MAX_EXTENSION = 1 << 20,
};

/* The first number that does not fit into eleven octal digits. */
#define TAR_OCTAL_LIMIT (INT64_C(1) << 33)

/* One thing in a tree. `name` is relative; `target` is where a link leads; `mtime` in whole seconds. */
struct tar_entry {
    char kind;
    char *name, *target; /* For free(). */
    uint32_t mode;
    int64_t size, mtime;
};

/* What extensions said of the entry that comes next. Begins as {0}. */
struct tar_overrides {
    char *path, *target; /* For free(); NULL: nothing. */
    size_t path_length, target_length;
    int64_t size;
    bool has_size, sparse;
};

/* The archive of all below a directory, names sorted, in pieces of about 64 KiB. A file that has grown since
 * its header was written is cut there. Sockets and devices are left out. */
struct giver *tar_pack(const char *root);
/* Fills a directory from an archive that comes piece by piece; what is in the way is replaced. Entries that
 * would lie outside the directory, by their name or behind a symbolic link, are refused. NULL with the
 * fault. */
struct sink *tar_unpack(const char *root, struct fault *fault);

/* So many bytes follow a body of `size` bytes to fill its last block. */
size_t tar_padding(int64_t size);
/* Adds the blocks that precede the entry's body. */
void tar_add_header(struct buffer *to, const struct tar_entry *entry);
/* The end of an archive: two blocks of zeros. */
void tar_add_zeros(struct buffer *to, size_t size);

/* Reads a header block. True without a name for a block of zeros, which ends the archive. False: `why`. */
bool tar_parse(struct tar_entry *entry, const char *block, const char **why);
/* The body of an extension of the entry's kind; global records, which name no file, are passed over. */
bool tar_override(struct tar_overrides *overrides, char kind, const char *body, size_t size,
                  const char **why);
/* Puts them into the entry, and forgets them. */
bool tar_apply(struct tar_overrides *overrides, struct tar_entry *entry, const char **why);
void tar_entry_free(struct tar_entry *entry);
void tar_overrides_free(struct tar_overrides *overrides);

#endif
