/* Whole directories as tar archives, piece by piece; nothing is held whole in memory. */
#include "files.h"
#include "tar.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char ROOT[] = "./";

/* A file with several names, by the first of them. */
struct link {
    dev_t device;
    ino_t inode;
    char *name;
};

struct packer {
    struct giver giver;
    char *root;
    struct names stack; /* Names in the archive that are still to come, the last one first. */
    void *links;        /* A tree of `struct link`. */
    char *path;         /* Of the entry that is being packed. */
    int64_t size, left; /* Of its body. */
    int fd;             /* -1: it has none. */
    bool begun, ended;
};

static int by_inode(const void *left, const void *right) {
    const struct link *a = left, *b = right;
    if (a->device != b->device)
        return a->device < b->device ? -1 : 1;
    return (a->inode > b->inode) - (a->inode < b->inode);
}

static void free_link(void *object) {
    struct link *link = object;
    free(link->name);
    free(link);
}

static void packer_close(struct giver *giver) {
    struct packer *packer = (struct packer *)giver;
    if (packer->fd >= 0)
        close(packer->fd);
    tdestroy(packer->links, free_link);
    names_free(&packer->stack);
    free(packer->path);
    free(packer->root);
    free(packer);
}

/* The first name of this file in the archive: `name`, if it had none before. */
static const char *first_name(struct packer *packer, const struct stat *status, const char *name) {
    struct link *link = memory_get(sizeof *link);
    *link = (struct link){status->st_dev, status->st_ino, NULL};
    struct link **place = tsearch(link, &packer->links, by_inode);
    if (place == NULL)
        memory_gone("memory");
    if (*place == link)
        link->name = memory_copy(name, strlen(name));
    else
        free(link);
    return (*place)->name;
}

static char kind_of(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFREG:
        return TAR_REGULAR;
    case S_IFDIR:
        return TAR_DIRECTORY;
    case S_IFLNK:
        return TAR_SYMLINK;
    case S_IFIFO:
        return TAR_FIFO;
    default:
        return 0;
    }
}

/* Looks at what is at the path; what is a regular file is open then. */
static bool look(struct packer *packer, bool root, struct stat *status, struct fault *fault) {
    if ((root ? stat : lstat)(packer->path, status) != 0)
        return fault_os(fault, errno);
    if (!S_ISREG(status->st_mode))
        return true;
    /* Described by what was opened: another may take its place at any time. A pipe would block. */
    packer->fd = open(packer->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    return (packer->fd >= 0 && fstat(packer->fd, status) == 0) || fault_os(fault, errno);
}

static bool add_entry(struct packer *packer, char *name, struct buffer *piece, struct fault *fault) {
    struct stat status;
    char none[] = "";
    char *target = NULL;
    if (!look(packer, strcmp(name, ROOT) == 0, &status, fault))
        return false;
    mode_t mode = status.st_mode;
    struct tar_entry entry = {kind_of(mode), name, none, mode & 07777, 0, status.st_mtime};
    if (entry.kind == TAR_REGULAR)
        entry.size = status.st_size;
    if (entry.kind == TAR_SYMLINK && (entry.target = target = read_link(packer->path, fault)) == NULL)
        return false;
    if (status.st_nlink > 1 && entry.kind != TAR_DIRECTORY && entry.kind != 0) {
        const char *first = first_name(packer, &status, name);
        if (strcmp(first, name) != 0) {
            entry.kind = TAR_HARD_LINK;
            entry.size = 0;
            entry.target = (char *)first;
        }
    }
    if (entry.kind != 0)
        tar_add_header(piece, &entry);
    free(target);
    packer->size = packer->left = entry.size;
    if (packer->fd >= 0 && entry.kind != TAR_REGULAR) {
        close(packer->fd);
        packer->fd = -1;
    }
    return true;
}

/* What the directory holds comes next, the first name first. */
static bool add_children(struct packer *packer, const char *name, struct fault *fault) {
    struct names found = {0};
    if (!names_read(&found, packer->path, fault)) {
        names_free(&found);
        return false;
    }
    names_sort(&found);
    for (size_t n = found.count; n-- != 0;) {
        const struct name *item = &found.items[n];
        struct buffer below = {0};
        buffer_add(&below, name, strlen(name));
        buffer_add(&below, item->text, strlen(item->text));
        if (item->directory)
            buffer_add(&below, "/", 1);
        names_add(&packer->stack, memory_copy(buffer_at(&below), buffer_size(&below)), item->directory);
        buffer_free(&below);
    }
    names_free(&found);
    return true;
}

static char *path_of(const struct packer *packer, const char *name) {
    if (strcmp(name, ROOT) == 0)
        return memory_copy(packer->root, strlen(packer->root));
    char *below = without_slash(name + strlen(ROOT));
    char *path = join_path(packer->root, below);
    free(below);
    return path;
}

static bool add_next(struct packer *packer, struct buffer *piece, struct fault *fault) {
    struct name next = packer->stack.items[--packer->stack.count];
    bool root = strcmp(next.text, ROOT) == 0;
    free(packer->path);
    packer->path = path_of(packer, next.text);
    bool added = add_entry(packer, next.text, piece, fault) &&
                 (!next.directory || add_children(packer, next.text, fault));
    free(next.text);
    if (added)
        return true;
    if (packer->fd >= 0)
        close(packer->fd);
    packer->fd = -1;
    /* One may have been removed since its directory was read. */
    if (fault->number == ENOENT)
        return !root;
    return fault_about(fault, "", packer->path);
}

static bool add_body(struct packer *packer, struct buffer *piece, struct fault *fault) {
    while (packer->left != 0 && buffer_size(piece) < WIRE_PIECE) {
        size_t size = packer->left < WIRE_PIECE ? (size_t)packer->left : WIRE_PIECE;
        ssize_t count = read(packer->fd, buffer_room(piece, size), size);
        if (count < 0)
            return fault_os(fault, errno) || fault_about(fault, "", packer->path);
        if (count == 0) {
            fault_say(fault, EIO, "it became shorter while it was read");
            return fault_about(fault, "", packer->path);
        }
        buffer_grew(piece, (size_t)count);
        packer->left -= count;
    }
    if (packer->left != 0)
        return true;
    tar_add_zeros(piece, tar_padding(packer->size));
    close(packer->fd);
    packer->fd = -1;
    return true;
}

static bool begin(struct packer *packer, struct fault *fault) {
    struct stat status;
    if (stat(packer->root, &status) != 0)
        return fault_os(fault, errno);
    if (!S_ISDIR(status.st_mode))
        return fault_os(fault, ENOTDIR);
    names_add(&packer->stack, memory_copy(ROOT, strlen(ROOT)), true);
    packer->begun = true;
    return true;
}

static enum step packer_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct packer *packer = (struct packer *)giver;
    bool right = packer->begun || begin(packer, fault);
    if (packer->ended)
        return STEP_END;
    while (right && !packer->ended && buffer_size(piece) < WIRE_PIECE) {
        if (packer->fd >= 0) {
            right = add_body(packer, piece, fault);
        } else if (packer->stack.count != 0) {
            right = add_next(packer, piece, fault);
        } else {
            tar_add_zeros(piece, 2 * TAR_BLOCK);
            packer->ended = true;
        }
    }
    return right ? STEP_PIECE : STEP_FAULT;
}

struct giver *tar_pack(const char *root) {
    static const struct giver_kind PACKER = {packer_next, packer_close};
    struct packer *packer = memory_get(sizeof *packer);
    *packer = (struct packer){.giver = {&PACKER}, .root = memory_copy(root, strlen(root)), .fd = -1};
    return &packer->giver;
}
