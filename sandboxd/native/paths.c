/* Paths, names in directories, and the small steps that all file operations share. */
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool write_all(int fd, const char *data, size_t size, struct fault *fault) {
    while (size != 0) {
        ssize_t count = write(fd, data, size);
        if (count < 0 && errno != EINTR)
            return fault_os(fault, errno);
        if (count > 0) {
            data += count;
            size -= (size_t)count;
        }
    }
    return true;
}

bool is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

/* One that was there is as good. The reason is the first call's, not that of the look that follows. */
static bool make_directory(const char *path, mode_t mode, struct fault *fault) {
    if (mkdir(path, mode) == 0)
        return true;
    int number = errno;
    return is_directory(path) || fault_os(fault, number);
}

bool make_directories(const char *path, struct fault *fault) {
    if (is_directory(path))
        return true;
    size_t length = strlen(path);
    char *partly = memory_copy(path, length);
    bool made = true;
    for (size_t end = 1; end < length && made; end++) {
        if (path[end] != '/')
            continue;
        partly[end] = 0;
        /* What is in the way is told by the step below it. */
        made = make_directory(partly, 0777, fault) || fault->number == EEXIST;
        partly[end] = '/';
    }
    made = made && make_directory(path, 0755, fault);
    free(partly);
    return made;
}

char *read_link(const char *path, struct fault *fault) {
    char target[PATH_MAX + 1];
    ssize_t length = readlink(path, target, sizeof target);
    if (length >= 0)
        return memory_copy(target, (size_t)length);
    fault_os(fault, errno);
    return NULL;
}

char *join_path(const char *directory, const char *name) {
    size_t length = strlen(directory);
    size_t slash = length != 0 && directory[length - 1] != '/';
    size_t rest = strlen(name);
    char *path = memory_resize(NULL, length + slash + rest + 1);
    memcpy(path, directory, length);
    path[length] = '/';
    memcpy(path + length + slash, name, rest + 1);
    return path;
}

char *without_slash(const char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    return memory_copy(path, length);
}

/* -- names */

void names_add(struct names *names, char *text, bool directory) {
    if (names->count == names->room) {
        names->room = 2 * names->room + 16;
        names->items = memory_resize(names->items, names->room * sizeof *names->items);
    }
    names->items[names->count++] = (struct name){text, directory};
}

static bool entry_is_directory(DIR *directory, const struct dirent *entry) {
    struct stat status;
    if (entry->d_type != DT_UNKNOWN)
        return entry->d_type == DT_DIR;
    int result = fstatat(dirfd(directory), entry->d_name, &status, AT_SYMLINK_NOFOLLOW);
    return result == 0 && S_ISDIR(status.st_mode);
}

bool names_read(struct names *names, const char *path, struct fault *fault) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return fault_os(fault, errno);
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(directory);
        if (entry == NULL)
            break;
        const char *name = entry->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
            names_add(names, memory_copy(name, strlen(name)), entry_is_directory(directory, entry));
    }
    bool whole = errno == 0 || fault_os(fault, errno);
    closedir(directory);
    return whole;
}

static int by_text(const void *left, const void *right) {
    const struct name *a = left, *b = right;
    return strcmp(a->text, b->text);
}

void names_sort(struct names *names) {
    if (names->count > 1)
        qsort(names->items, names->count, sizeof *names->items, by_text);
}

void names_free(struct names *names) {
    for (size_t n = 0; n < names->count; n++)
        free(names->items[n].text);
    free(names->items);
    *names = (struct names){0};
}

bool leads_out(const char *name) {
    if (*name == '/')
        return true;
    for (const char *part = name; part != NULL; part = strchr(part, '/')) {
        part += *part == '/';
        if (part[0] == '.' && part[1] == '.' && (part[2] == '/' || part[2] == 0))
            return true;
    }
    return false;
}
