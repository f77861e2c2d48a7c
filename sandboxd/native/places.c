/* Steps upon files and directories. */
#include "ops.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

enum { LINKS = 40, MODE = 0755 };

/* directory, path, mode */
int op_mkdir(struct start *start, const struct argument *a) {
    return mkdirat(start->slots[a[0].number], a[1].text, (mode_t)a[2].number);
}

/* directory, path, new path */
int op_rename(struct start *start, const struct argument *a) {
    int directory = start->slots[a[0].number];
    return renameat(directory, a[1].text, directory, a[2].text);
}

static int is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static int make_one(const char *path) {
    if (mkdir(path, MODE) == 0)
        return 0;
    int number = errno;
    if (is_directory(path))
        return 0;
    errno = number; /* Of mkdir: a file system that is read-only, say. */
    return -1;
}

static int make_directories(const char *path) {
    char part[PATH_MAX];
    size_t size = strlen(path);
    if (size >= sizeof part) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(part, path, size + 1);
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (make_one(part) != 0)
            return -1;
        *slash = '/';
    }
    return make_one(part);
}

/* path */
int op_makedirs(struct start *start, const struct argument *a) {
    (void)start;
    return make_directories(a[0].text);
}

/* path, backlog, slot: a unix socket that takes connections */
int op_listen(struct start *start, const struct argument *a) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (a[0].size >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, a[0].text, a[0].size + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    start->slots[a[2].number] = fd;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0)
        return -1;
    return listen(fd, (int)a[1].number);
}

/* directory, path, flags, slot, whether it may be missing or closed to us */
int op_open(struct start *start, const struct argument *a) {
    int fd = openat(start->slots[a[0].number], a[1].text, (int)a[2].number | O_CLOEXEC);
    start->slots[a[3].number] = fd;
    return fd >= 0 || a[4].number ? 0 : -1;
}

/* directory, path, text, whether the file may be missing */
int op_write(struct start *start, const struct argument *a) {
    int fd = openat(start->slots[a[0].number], a[1].text, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT && a[3].number ? 0 : -1;
    ssize_t written = write(fd, a[2].text, a[2].size);
    int number = written < 0 ? errno : EIO;
    close(fd);
    if (written == (ssize_t)a[2].size)
        return 0;
    errno = number;
    return -1;
}

/* slot */
int op_close(struct start *start, const struct argument *a) {
    int fd = start->slots[a[0].number];
    start->slots[a[0].number] = -1;
    return fd < 0 ? 0 : close(fd);
}

/* slot, name: hands the descriptor to the launcher */
int op_give(struct start *start, const struct argument *a) {
    char kind = 'd';
    struct iovec parts[] = {{&kind, 1}, {(void *)(uintptr_t)a[1].text, a[1].size}};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } room = {{0}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    message.msg_control = &room;
    message.msg_controllen = sizeof room;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &start->slots[a[0].number], sizeof(int));
    return sendmsg(start->control, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

/* path */
int op_chdir(struct start *start, const struct argument *a) {
    (void)start;
    return chdir(a[0].text);
}

/* Takes the last name away. */
static void ascend(char *path) {
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = 0;
}

/* Puts `target`, a link's text, before the rest of a path. */
static int put_before(char *rest, size_t room, const char *target, size_t size) {
    size_t left = strlen(rest);
    if (size + 1 + left + 1 > room) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memmove(rest + size + 1, rest, left + 1);
    memcpy(rest, target, size);
    rest[size] = '/';
    return 0;
}

/* Cuts the first name off a path; returns its size, 0 at the end. */
static size_t next_name(char *rest, char name[PATH_MAX]) {
    size_t skipped = strspn(rest, "/"), size = strcspn(rest + skipped, "/");
    if (size >= PATH_MAX)
        size = PATH_MAX - 1; /* No file has such a name: the next call says so. */
    memcpy(name, rest + skipped, size);
    name[size] = 0;
    memmove(rest, rest + skipped + size, strlen(rest + skipped + size) + 1);
    return size;
}

/* Writes the place of `path` to `real`, of PATH_MAX bytes, with every link in it read as text; what is
 * missing counts as no link. The kernel's own way leads through links in /proc to where no text would. */
static int resolve(const char *path, char *real) {
    char rest[2 * PATH_MAX], name[PATH_MAX], target[PATH_MAX];
    int links = 0;
    *real = *rest = 0;
    if (put_before(rest, PATH_MAX, path, strlen(path)) != 0)
        return -1;
    for (size_t size; (size = next_name(rest, name)) != 0;) {
        size_t used = strlen(real);
        if (strcmp(name, ".") == 0)
            continue;
        if (strcmp(name, "..") == 0) {
            ascend(real);
            continue;
        }
        if (used + 1 + size >= PATH_MAX || links > LINKS) {
            errno = links > LINKS ? ELOOP : ENAMETOOLONG;
            return -1;
        }
        real[used] = '/';
        memcpy(real + used + 1, name, size + 1);
        ssize_t length = readlink(real, target, sizeof target);
        if (length < 0)
            continue;
        links++;
        real[*target == '/' ? 0 : used] = 0;
        if (put_before(rest, sizeof rest, target, (size_t)length) != 0)
            return -1;
    }
    if (*real == 0)
        memcpy(real, "/", 2);
    return 0;
}

/* Makes what is missing and gives it to the sandbox's user; what is there only where an image brought it. */
static int give(const char *path, uid_t owner, int as_found) {
    char real[PATH_MAX];
    if (resolve(path, real) != 0)
        return -1;
    if (!is_directory(real)) {
        if (make_directories(real) != 0)
            return -1;
    } else if (as_found || strcmp(real, "/") == 0) {
        return 0;
    }
    return chown(real, owner, owner);
}

/* path, owner, whether directories that are there stay as they are */
int op_workspace(struct start *start, const struct argument *a) {
    (void)start;
    return give(a[0].text, (uid_t)a[1].number, a[2].number != 0);
}
