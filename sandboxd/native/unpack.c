/* Fills a directory from a tar archive that comes piece by piece.
 *
 * Modes and times of directories are set at the end, for what they hold must be written first. */
#include "files.h"
#include "tar.h"

#include <errno.h>
#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A directory whose mode and time are still to be set. */
struct directory {
    char *path;
    uint32_t mode;
    int64_t mtime;
};

enum part { HEADER, EXTENSION, BODY, PADDING, END };
enum outcome { GO_ON, WAIT, FAIL };

struct unpacker {
    struct sink sink;
    char *root;
    bool made_root;
    struct buffer buffer;
    struct tar_overrides overrides;
    struct tar_entry entry; /* The extension or the file that comes. */
    enum part part;
    int64_t left; /* Of it, or of its padding. */
    int fd;       /* -1: no file is being written. */
    char *path;   /* Of the file that is being written. */
    uint64_t count;
    void *directories; /* A tree of `struct directory`. */
    size_t directory_count;
};

static int by_path(const void *left, const void *right) {
    const struct directory *a = left, *b = right;
    return strcmp(a->path, b->path);
}

static void free_directory(void *object) {
    struct directory *directory = object;
    free(directory->path);
    free(directory);
}

static void close_file(struct unpacker *unpacker) {
    if (unpacker->fd >= 0)
        close(unpacker->fd);
    unpacker->fd = -1;
    free(unpacker->path);
    unpacker->path = NULL;
}

/* A file that did not come whole is none; unless another has taken its place meanwhile. */
static void drop_half_file(const struct unpacker *unpacker) {
    struct stat ours, there;
    if (unpacker->fd >= 0 && fstat(unpacker->fd, &ours) == 0 && lstat(unpacker->path, &there) == 0 &&
        ours.st_dev == there.st_dev && ours.st_ino == there.st_ino)
        unlink(unpacker->path);
}

static void unpacker_close(struct sink *sink) {
    struct unpacker *unpacker = (struct unpacker *)sink;
    drop_half_file(unpacker);
    close_file(unpacker);
    buffer_free(&unpacker->buffer);
    tar_overrides_free(&unpacker->overrides);
    tar_entry_free(&unpacker->entry);
    tdestroy(unpacker->directories, free_directory);
    free(unpacker->root);
    free(unpacker);
}

/* -- where entries go */

/* The next part of a name that says something; `size` 0: there is none. */
static const char *next_part(const char *at, size_t *size) {
    for (;; at += *size) {
        at += strspn(at, "/");
        *size = strcspn(at, "/");
        if (*size != 1 || *at != '.')
            return at;
    }
}

static bool make_parent(const char *path, struct fault *fault) {
    struct stat status;
    if (mkdir(path, 0755) == 0)
        return true;
    if (errno != EEXIST || lstat(path, &status) != 0)
        return fault_os(fault, errno);
    return S_ISDIR(status.st_mode) || fault_say(fault, ENOTDIR, "it lies behind a file or a link");
}

/* The path of an entry, its parents made, for free(); NULL with the fault, as where it lies outside. */
static char *inside(const struct unpacker *unpacker, const char *name, struct fault *fault) {
    if (leads_out(name)) {
        fault_say(fault, EINVAL, "it lies outside the directory");
        return NULL;
    }
    size_t size, next_size;
    char *path = memory_copy(unpacker->root, strlen(unpacker->root));
    const char *part = next_part(name, &size);
    while (size != 0) {
        const char *next = next_part(part + size, &next_size);
        char *below = memory_copy(part, size), *longer = join_path(path, below);
        free(below);
        free(path);
        path = longer;
        if (next_size != 0 && !make_parent(path, fault)) {
            free(path);
            return NULL;
        }
        part = next;
        size = next_size;
    }
    return path;
}

/* Makes way for a new entry; a directory that is in the way is not replaced by a file. */
static bool clear_way(const char *path, struct fault *fault) {
    struct stat status;
    return lstat(path, &status) != 0 || unlink(path) == 0 || fault_os(fault, errno);
}

/* -- entries */

static bool set_time(int fd, const char *path, int64_t mtime, struct fault *fault) {
    struct timespec times[2] = {{.tv_sec = mtime}, {.tv_sec = mtime}};
    int result = fd >= 0 ? futimens(fd, times) : utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
    return result == 0 || fault_os(fault, errno);
}

static void remember(struct unpacker *unpacker, const char *path, const struct tar_entry *entry) {
    struct directory *directory = memory_get(sizeof *directory);
    directory->path = memory_copy(path, strlen(path));
    struct directory **place = tsearch(directory, &unpacker->directories, by_path);
    if (place == NULL)
        memory_gone("memory");
    if (*place != directory)
        free_directory(directory);
    else
        unpacker->directory_count++;
    (*place)->mode = entry->mode & 07777;
    (*place)->mtime = entry->mtime;
}

static bool make_directory(struct unpacker *unpacker, const char *path, const struct tar_entry *entry,
                           struct fault *fault) {
    struct stat status;
    if (strcmp(path, unpacker->root) == 0) {
        if (unpacker->made_root) /* One that was there is its owner's to close or open. */
            remember(unpacker, path, entry);
        return true;
    }
    if (lstat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        if (chmod(path, 0700 | (entry->mode & 07777)) != 0)
            return fault_os(fault, errno);
    } else if (!clear_way(path, fault)) {
        return false;
    } else if (mkdir(path, 0700) != 0) {
        return fault_os(fault, errno);
    }
    remember(unpacker, path, entry);
    return true;
}

static bool make_link(struct unpacker *unpacker, const char *path, const struct tar_entry *entry,
                      struct fault *fault) {
    struct stat status;
    char *source = inside(unpacker, entry->target, fault);
    if (source == NULL)
        return false;
    bool made;
    if (strcmp(source, path) == 0) /* A link to itself asks only that it be there. */
        made = lstat(path, &status) == 0 || fault_os(fault, errno);
    else
        made = clear_way(path, fault) &&
               (linkat(AT_FDCWD, source, AT_FDCWD, path, 0) == 0 || fault_os(fault, errno));
    free(source);
    return made;
}

/* A file, whose body comes next, or what has none. */
static bool make_other(struct unpacker *unpacker, const char *path, const struct tar_entry *entry,
                       struct fault *fault) {
    if (!clear_way(path, fault))
        return false;
    if (entry->kind == TAR_REGULAR) {
        unpacker->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (unpacker->fd < 0)
            return fault_os(fault, errno);
        unpacker->path = memory_copy(path, strlen(path));
        return true;
    }
    if (entry->kind == TAR_SYMLINK) {
        bool made = symlink(entry->target, path) == 0 || fault_os(fault, errno);
        return made && set_time(-1, path, entry->mtime, fault);
    }
    if (entry->kind == TAR_FIFO)
        return mkfifo(path, entry->mode & 07777) == 0 || fault_os(fault, errno);
    char text[64];
    snprintf(text, sizeof text, "an entry of kind 0x%02x cannot be made", (unsigned char)entry->kind);
    return fault_say(fault, EPERM, text);
}

static bool place(struct unpacker *unpacker, struct fault *fault) {
    struct tar_entry *entry = &unpacker->entry;
    char *path = inside(unpacker, entry->name, fault);
    if (path == NULL)
        return false;
    if (entry->mtime < 0)
        entry->mtime = 0;
    if (entry->mtime >= TAR_OCTAL_LIMIT)
        entry->mtime = TAR_OCTAL_LIMIT - 1;
    bool placed;
    if (entry->kind == TAR_DIRECTORY)
        placed = make_directory(unpacker, path, entry, fault);
    else if (strcmp(path, unpacker->root) == 0)
        placed = fault_say(fault, EINVAL, "an entry without a name");
    else if (entry->kind == TAR_HARD_LINK)
        placed = make_link(unpacker, path, entry, fault);
    else
        placed = make_other(unpacker, path, entry, fault);
    free(path);
    return placed;
}

/* -- the archive */

static enum outcome malformed(const char *why, struct fault *fault) {
    fault_say(fault, EINVAL, why);
    fault_about(fault, "not a tar archive", "");
    return FAIL;
}

static enum outcome take_header(struct unpacker *unpacker, struct fault *fault) {
    struct tar_entry *entry = &unpacker->entry;
    const char *why = "";
    if (buffer_size(&unpacker->buffer) < TAR_BLOCK)
        return WAIT;
    tar_entry_free(entry);
    if (!tar_parse(entry, buffer_at(&unpacker->buffer), &why))
        return malformed(why, fault);
    buffer_take(&unpacker->buffer, TAR_BLOCK);
    if (entry->name == NULL) {
        unpacker->part = END;
        return GO_ON;
    }
    if (memchr("xgLK", entry->kind, 4) != NULL) {
        unpacker->part = EXTENSION;
        if (entry->size > TAR_MAX_EXTENSION)
            return malformed("an extension that is too long", fault);
        return GO_ON;
    }
    if (!tar_apply(&unpacker->overrides, entry, &why))
        return malformed(why, fault);
    if (!place(unpacker, fault)) {
        fault_about(fault, "", entry->name);
        return FAIL;
    }
    unpacker->count++;
    if (unpacker->fd >= 0) {
        unpacker->part = BODY;
        unpacker->left = entry->size;
    }
    return GO_ON;
}

static enum outcome take_extension(struct unpacker *unpacker, struct fault *fault) {
    size_t size = (size_t)unpacker->entry.size;
    const char *why = "";
    if (buffer_size(&unpacker->buffer) < size)
        return WAIT;
    if (!tar_override(&unpacker->overrides, unpacker->entry.kind, buffer_at(&unpacker->buffer), size, &why))
        return malformed(why, fault);
    buffer_take(&unpacker->buffer, size);
    unpacker->part = PADDING;
    unpacker->left = (int64_t)tar_padding((int64_t)size);
    return GO_ON;
}

/* So much of what is left has come. */
static size_t come(const struct unpacker *unpacker) {
    size_t size = buffer_size(&unpacker->buffer);
    return (uint64_t)unpacker->left < size ? (size_t)unpacker->left : size;
}

static enum outcome take_body(struct unpacker *unpacker, struct fault *fault) {
    size_t size = come(unpacker);
    if (!write_all(unpacker->fd, buffer_at(&unpacker->buffer), size, fault))
        return FAIL;
    buffer_take(&unpacker->buffer, size);
    unpacker->left -= (int64_t)size;
    if (unpacker->left != 0)
        return WAIT;
    bool set = fchmod(unpacker->fd, unpacker->entry.mode & 07777) == 0 || fault_os(fault, errno);
    if (!set || !set_time(unpacker->fd, NULL, unpacker->entry.mtime, fault))
        return FAIL;
    close_file(unpacker);
    unpacker->part = PADDING;
    unpacker->left = (int64_t)tar_padding(unpacker->entry.size);
    return GO_ON;
}

static enum outcome take_padding(struct unpacker *unpacker) {
    size_t size = come(unpacker);
    buffer_take(&unpacker->buffer, size);
    unpacker->left -= (int64_t)size;
    if (unpacker->left != 0)
        return WAIT;
    unpacker->part = HEADER;
    return GO_ON;
}

/* Takes one thing off the buffer. */
static enum outcome take(struct unpacker *unpacker, struct fault *fault) {
    switch (unpacker->part) {
    case HEADER:
        return take_header(unpacker, fault);
    case EXTENSION:
        return take_extension(unpacker, fault);
    case BODY:
        return take_body(unpacker, fault);
    case PADDING:
        return take_padding(unpacker);
    default: /* Archives are padded to whole records. */
        buffer_free(&unpacker->buffer);
        return WAIT;
    }
}

static bool unpacker_feed(struct sink *sink, const char *data, size_t size, struct fault *fault) {
    struct unpacker *unpacker = (struct unpacker *)sink;
    enum outcome outcome = GO_ON;
    if (unpacker->part != END)
        buffer_add(&unpacker->buffer, data, size);
    while (outcome == GO_ON)
        outcome = take(unpacker, fault);
    return outcome == WAIT;
}

/* -- the end */

static void collect(const void *node, VISIT visit, void *closure) {
    struct directory ***next = closure;
    if (visit == postorder || visit == leaf)
        *(*next)++ = *(struct directory *const *)node;
}

static size_t depth(const struct directory *directory) {
    size_t count = 0;
    for (const char *at = directory->path; (at = strchr(at, '/')) != NULL; at++)
        count++;
    return count;
}

static int deepest_first(const void *left, const void *right) {
    size_t a = depth(*(struct directory *const *)left), b = depth(*(struct directory *const *)right);
    return (a < b) - (a > b);
}

static bool unpacker_finish(struct sink *sink, uint64_t *count, struct fault *fault) {
    struct unpacker *unpacker = (struct unpacker *)sink;
    if (unpacker->part != END)
        return fault_say(fault, EINVAL, "the archive ends early");
    struct directory **all = memory_get((unpacker->directory_count + 1) * sizeof(struct directory *));
    struct directory **next = all;
    twalk_r(unpacker->directories, collect, &next);
    qsort(all, unpacker->directory_count, sizeof *all, deepest_first);
    bool right = true;
    for (size_t n = 0; n < unpacker->directory_count && right; n++) {
        struct timespec times[2] = {{.tv_sec = all[n]->mtime}, {.tv_sec = all[n]->mtime}};
        right = chmod(all[n]->path, all[n]->mode) == 0 && utimensat(AT_FDCWD, all[n]->path, times, 0) == 0;
        if (!right)
            fault_os(fault, errno);
    }
    free(all);
    *count = unpacker->count;
    return right;
}

struct sink *tar_unpack(const char *root, struct fault *fault) {
    static const struct sink_kind UNPACKER = {unpacker_feed, unpacker_finish, unpacker_close};
    bool made_root = !is_directory(root);
    if (!make_directories(root, fault))
        return NULL;
    struct unpacker *unpacker = memory_get(sizeof *unpacker);
    *unpacker = (struct unpacker){.sink = {&UNPACKER}, .root = memory_copy(root, strlen(root)), .fd = -1};
    unpacker->made_root = made_root;
    return &unpacker->sink;
}
