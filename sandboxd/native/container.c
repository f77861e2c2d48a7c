/* The guest as a container's first process: binds its socket and says on standard output that it is ready. */
#include "container.h"

#include "guest.h"
#include "memory.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 512 };

static int failed(const char *what) {
    fprintf(stderr, "sandboxd-guest: %s: %s\n", what, strerror(errno));
    return 1;
}

/* By cgroup v1 and v2, as the container sees its own. */
static struct memory_files find_memory(void) {
    static const char *const GROUPS[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"};
    for (int n = 0; n < 2; n++) {
        int group = open(GROUPS[n], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (group < 0)
            continue;
        struct memory_files files = memory_files_of(group);
        close(group);
        return files;
    }
    return (struct memory_files){-1, -1, -1};
}

/* -1: it cannot be. */
static int listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    mode_t mask = umask(0); /* The daemon, another user, must be able to connect. */
    int bound = listener >= 0 ? bind(listener, (struct sockaddr *)&address, sizeof address) : -1;
    umask(mask);
    return bound == 0 && listen(listener, BACKLOG) == 0 ? listener : -1;
}

/* What the file at `path` holds: the key that marks commands, then the filter that asks for it. Everything
 * that is started here inherits the filter. */
static bool confine(const char *path) {
    static struct {
        char key[TREE_KEY_BYTES];
        struct sock_filter instructions[BPF_MAXINSNS];
    } held;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, &held, sizeof held), body = size - TREE_KEY_BYTES;
    if (fd >= 0)
        close(fd);
    if (size < 0)
        return false;
    if (body <= 0 || body % (ssize_t)sizeof(struct sock_filter) != 0) {
        errno = EBADMSG;
        return false;
    }
    struct sock_fprog program = {
        .len = (unsigned short)((size_t)body / sizeof(struct sock_filter)),
        .filter = held.instructions,
    };
    tree_set_key(held.key);
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, (unsigned long)SECCOMP_MODE_FILTER, &program, 0UL, 0UL) == 0;
}

int container_main(const char *path, const char *ready, const char *filter) {
    struct memory_files memory = find_memory();
    int oom_score_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    int listener = listen_at(path);
    if (listener < 0 || chdir("/") != 0)
        return failed(path);
    if (filter != NULL && !confine(filter))
        return failed(filter);
    /* The last line of standard output is the daemon's event: it need not look for the socket again. */
    if (write(1, ready, strlen(ready)) < 0)
        return failed("standard output");
    /* From now on nothing that the descriptors lead to is the container's output. */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int stream = 0; null >= 0 && stream < 3; stream++)
        dup2(null, stream);
    return guest_serve(listener, memory, -1, oom_score_fd);
}
