/* Files read, described and written, each in steps short enough for the loop. */
#include "files.h"

#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* -- reading */

struct reader {
    struct giver giver;
    char *path; /* Until it is open. */
    uint64_t offset;
    int64_t left; /* Negative: all there is. */
    int fd;
};

static void reader_close(struct giver *giver) {
    struct reader *reader = (struct reader *)giver;
    if (reader->fd >= 0)
        close(reader->fd);
    free(reader->path);
    free(reader);
}

static bool reader_open(struct reader *reader, struct fault *fault) {
    struct stat status;
    /* Without O_NONBLOCK a named pipe would hold up the whole guest. */
    reader->fd = open(reader->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (reader->fd < 0 || fstat(reader->fd, &status) != 0)
        return fault_os(fault, errno);
    if (S_ISDIR(status.st_mode))
        return fault_os(fault, EISDIR);
    if (!S_ISREG(status.st_mode))
        return fault_say(fault, EINVAL, "not a regular file");
    return lseek(reader->fd, (off_t)reader->offset, SEEK_SET) >= 0 || fault_os(fault, errno);
}

static enum step reader_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct reader *reader = (struct reader *)giver;
    if (reader->fd < 0 && !reader_open(reader, fault))
        return STEP_FAULT;
    size_t size = WIRE_PIECE;
    if (reader->left >= 0 && reader->left < (int64_t)size)
        size = (size_t)reader->left;
    ssize_t count = read(reader->fd, buffer_room(piece, size), size);
    if (count < 0) {
        fault_os(fault, errno);
        return STEP_FAULT;
    }
    if (count == 0)
        return STEP_END;
    buffer_grew(piece, (size_t)count);
    if (reader->left >= 0)
        reader->left -= count;
    return STEP_PIECE;
}

struct giver *file_read(const char *path, uint64_t offset, int64_t limit) {
    static const struct giver_kind READER = {reader_next, reader_close};
    struct reader *reader = memory_get(sizeof *reader);
    *reader = (struct reader){{&READER}, memory_copy(path, strlen(path)), offset, limit, -1};
    return &reader->giver;
}

/* -- describing */

static int kind_of(mode_t mode) {
    if (S_ISREG(mode))
        return WIRE_REGULAR;
    if (S_ISDIR(mode))
        return WIRE_DIRECTORY;
    return S_ISLNK(mode) ? WIRE_SYMLINK : WIRE_OTHER;
}

static bool add_description(struct buffer *piece, const char *path, const char *name, struct fault *fault) {
    struct stat status;
    if (lstat(path, &status) != 0)
        return fault_os(fault, errno);
    char *target = S_ISLNK(status.st_mode) ? read_link(path, fault) : memory_copy("", 0);
    if (target == NULL)
        return false;
    char fields[WIRE_INFO_FIELDS];
    int64_t nanoseconds;
    /* A file system may know dates that do not fit. */
    if (__builtin_mul_overflow((int64_t)status.st_mtim.tv_sec, INT64_C(1000000000), &nanoseconds) ||
        __builtin_add_overflow(nanoseconds, status.st_mtim.tv_nsec, &nanoseconds))
        nanoseconds = status.st_mtim.tv_sec < 0 ? -INT64_MAX : INT64_MAX;
    fields[0] = (char)kind_of(status.st_mode);
    wire_put32(fields + 1, status.st_mode & 07777);
    wire_put64(fields + 5, (uint64_t)status.st_size);
    wire_put64(fields + 13, (uint64_t)nanoseconds);
    wire_put16(fields + 21, (uint16_t)strlen(name));
    wire_put32(fields + 23, (uint32_t)strlen(target));
    buffer_add(piece, fields, sizeof fields);
    buffer_add(piece, name, strlen(name));
    buffer_add(piece, target, strlen(target));
    free(target);
    return true;
}

struct describer {
    struct giver giver;
    char *path;
    bool listed; /* All of a directory, not the path itself. */
    bool begun;
    struct names names;
    size_t next;
};

static void describer_close(struct giver *giver) {
    struct describer *describer = (struct describer *)giver;
    names_free(&describer->names);
    free(describer->path);
    free(describer);
}

static enum step describe_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct describer *describer = (struct describer *)giver;
    if (describer->begun)
        return STEP_END;
    describer->begun = true;
    const char *name = strrchr(describer->path, '/');
    name = name != NULL ? name + 1 : describer->path;
    return add_description(piece, describer->path, name, fault) ? STEP_PIECE : STEP_FAULT;
}

static enum step list_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct describer *describer = (struct describer *)giver;
    if (!describer->begun) {
        if (!names_read(&describer->names, describer->path, fault))
            return STEP_FAULT;
        names_sort(&describer->names);
        describer->begun = true;
    }
    if (describer->next == describer->names.count)
        return STEP_END;
    while (describer->next < describer->names.count && buffer_size(piece) <= WIRE_PIECE) {
        const char *name = describer->names.items[describer->next++].text;
        char *path = join_path(describer->path, name);
        /* One may have been removed since. */
        bool told = add_description(piece, path, name, fault) || fault->number == ENOENT;
        free(path);
        if (!told)
            return STEP_FAULT;
    }
    return STEP_PIECE;
}

static struct giver *describer_new(const struct giver_kind *kind, char *path) {
    struct describer *describer = memory_get(sizeof *describer);
    *describer = (struct describer){.giver = {kind}, .path = path};
    return &describer->giver;
}

struct giver *file_describe(const char *path) {
    static const struct giver_kind DESCRIBER = {describe_next, describer_close};
    return describer_new(&DESCRIBER, without_slash(path));
}

struct giver *file_list(const char *path) {
    static const struct giver_kind LISTER = {list_next, describer_close};
    return describer_new(&LISTER, memory_copy(path, strlen(path)));
}

/* -- writing */

struct writer {
    struct sink sink;
    char *path, *partial;
    uint32_t mode;
    uint64_t size;
    int fd; /* -1: nothing is left to take away. */
};

static bool writer_feed(struct sink *sink, const char *data, size_t size, struct fault *fault) {
    struct writer *writer = (struct writer *)sink;
    writer->size += size;
    return write_all(writer->fd, data, size, fault);
}

static bool writer_finish(struct sink *sink, uint64_t *count, struct fault *fault) {
    struct writer *writer = (struct writer *)sink;
    if (fchmod(writer->fd, writer->mode & 07777) != 0 || rename(writer->partial, writer->path) != 0)
        return fault_os(fault, errno);
    int fd = writer->fd;
    writer->fd = -1;
    *count = writer->size;
    return close(fd) == 0 || fault_os(fault, errno);
}

static void writer_close(struct sink *sink) {
    struct writer *writer = (struct writer *)sink;
    if (writer->fd >= 0) {
        close(writer->fd);
        unlink(writer->partial); /* Its directory may be gone by now. */
    }
    free(writer->path);
    free(writer->partial);
    free(writer);
}

/* The directory part as far as it names one: "a//b" lies in "a", "//b" in "//". */
static char *parent_of(const char *path) {
    const char *slash = strrchr(path, '/');
    size_t length = slash != NULL ? (size_t)(slash - path) + 1 : 0;
    size_t kept = length;
    while (kept != 0 && path[kept - 1] == '/')
        kept--;
    return memory_copy(path, kept != 0 ? kept : length);
}

/* A new name beside `path`; 0 on failure, with the fault. */
static bool open_partial(struct writer *writer, struct fault *fault) {
    uint64_t number = 0;
    char name[40];
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return fault_os(fault, errno);
    snprintf(name, sizeof name, ".%016llx.partial", (unsigned long long)number);
    char *parent = parent_of(writer->path);
    if (make_directories(parent, fault)) {
        writer->partial = join_path(parent, name);
        int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
        writer->fd = open(writer->partial, flags, 0600);
        if (writer->fd < 0)
            fault_os(fault, errno);
    }
    free(parent);
    return writer->fd >= 0;
}

struct sink *file_write(const char *path, uint32_t mode, struct fault *fault) {
    static const struct sink_kind WRITER = {writer_feed, writer_finish, writer_close};
    size_t length = strlen(path);
    if (path[length - 1] == '/' || is_directory(path)) {
        fault_os(fault, EISDIR);
        return NULL;
    }
    struct writer *writer = memory_get(sizeof *writer);
    *writer = (struct writer){.sink = {&WRITER}, .path = memory_copy(path, length), .mode = mode, .fd = -1};
    if (open_partial(writer, fault))
        return &writer->sink;
    writer_close(&writer->sink);
    return NULL;
}
