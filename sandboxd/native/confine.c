/* Steps that take a process out of its host: namespaces, mounts, users, rights, limits. */
#include "ops.h"

#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* flags */
int op_unshare(struct start *start, const struct argument *a) {
    (void)start;
    return unshare((int)a[0].number);
}

/* source, target, kind, flags, data */
int op_mount(struct start *start, const struct argument *a) {
    (void)start;
    return mount(a[0].text, a[1].text, a[2].text, (unsigned long)a[3].number, a[4].text);
}

/* path: lazily, what still uses it keeps it until it is done */
int op_umount(struct start *start, const struct argument *a) {
    (void)start;
    return umount2(a[0].text, MNT_DETACH);
}

/* path: the root of this process from now on */
int op_chroot(struct start *start, const struct argument *a) {
    (void)start;
    return chroot(a[0].text);
}

/* name */
int op_hostname(struct start *start, const struct argument *a) {
    (void)start;
    return sethostname(a[0].text, a[0].size);
}

/* Takes the loopback of this network namespace up. */
int op_loopback(struct start *start, const struct argument *a) {
    (void)start, (void)a;
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int failed = ioctl(fd, SIOCSIFFLAGS, &request), number = errno;
    close(fd);
    errno = number;
    return failed;
}

/* kind, value: both the soft and the hard limit, which stays as it is where it is lower */
int op_rlimit(struct start *start, const struct argument *a) {
    (void)start;
    __rlimit_resource_t kind = (__rlimit_resource_t)a[0].number;
    struct rlimit limit;
    if (getrlimit(kind, &limit) != 0)
        return -1;
    rlim_t value = (rlim_t)a[1].number;
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < value)
        value = limit.rlim_max;
    limit.rlim_cur = limit.rlim_max = value;
    return setrlimit(kind, &limit);
}

/* number: becomes that user and that group, and is in no other */
int op_user(struct start *start, const struct argument *a) {
    (void)start;
    uid_t id = (uid_t)a[0].number;
    if (setgroups(0, NULL) != 0 || setresgid(id, id, id) != 0)
        return -1;
    return setresuid(id, id, id);
}

/* Gives up every capability as something that a program could bring; the present ones stay. */
int op_bounding(struct start *start, const struct argument *a) {
    (void)start, (void)a;
    unsigned long number = 0;
    while (prctl(PR_CAPBSET_DROP, number, 0UL, 0UL, 0UL) == 0)
        number++;
    /* The first number that is none says EINVAL. */
    return errno == EINVAL ? 0 : -1;
}

/* kept, as bits: gives up every other capability that this process has. */
int op_capabilities(struct start *start, const struct argument *a) {
    (void)start;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    uint64_t mask = (uint64_t)a[0].number;
    uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    struct __user_cap_data_struct kept[_LINUX_CAPABILITY_U32S_3] = {{low, low, 0}, {high, high, 0}};
    if (prctl(PR_CAP_AMBIENT, (unsigned long)PR_CAP_AMBIENT_CLEAR_ALL, 0UL, 0UL, 0UL) != 0)
        return -1;
    return (int)syscall(SYS_capset, &header, kept);
}

/* option, value */
int op_prctl(struct start *start, const struct argument *a) {
    (void)start;
    return prctl((int)a[0].number, (unsigned long)a[1].number, 0UL, 0UL, 0UL);
}

static int is_kept(const struct start *start, const struct argument *kept, int slot) {
    return start->slots[slot] >= 0 && memchr(kept->text, slot, kept->size) != NULL;
}

/* The lowest descriptor from `first` on that is kept, -1 when none is. */
static int next_kept(const struct start *start, const struct argument *kept, int first) {
    int lowest = -1;
    for (int slot = 0; slot < SLOTS; slot++)
        if (is_kept(start, kept, slot) && start->slots[slot] >= first &&
            (lowest < 0 || start->slots[slot] < lowest))
            lowest = start->slots[slot];
    return lowest;
}

static int close_range_of(unsigned first, unsigned last) {
    return first > last ? 0 : (int)syscall(SYS_close_range, first, last, 0U);
}

/* slots, one a byte: all other descriptors are closed, but the first three, which become /dev/null */
int op_keep(struct start *start, const struct argument *a) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), first = 3;
    if (null < 0)
        return -1;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0)
            return -1;
    for (int fd; (fd = next_kept(start, &a[0], first)) >= 0; first = fd + 1)
        if (close_range_of((unsigned)first, (unsigned)fd - 1) != 0)
            return -1;
    for (int slot = 1; slot < SLOTS; slot++)
        if (!is_kept(start, &a[0], slot))
            start->slots[slot] = -1;
    return close_range_of((unsigned)first, ~0U);
}

static char *title_begin;
static size_t title_room;

void title_find(int argc, char **argv) {
    title_begin = argv[0];
    title_room = (size_t)(argv[argc - 1] - argv[0]) + strlen(argv[argc - 1]) + 1;
}

void title_set(const char *title) {
    size_t size = strlen(title);
    if (title_room != 0) {
        memset(title_begin, 0, title_room);
        memcpy(title_begin, title, size < title_room ? size : title_room - 1);
    }
    prctl(PR_SET_NAME, title, 0UL, 0UL, 0UL);
}

/* text: what is shown as this process's command line, which would tell a sandbox of its host */
int op_title(struct start *start, const struct argument *a) {
    (void)start;
    title_set(a[0].text);
    return 0;
}

/* A session of its own. */
int op_setsid(struct start *start, const struct argument *a) {
    (void)start, (void)a;
    return setsid() < 0 ? -1 : 0;
}

/* slot: a pipe's end that can be read once all others are gone */
int op_alive(struct start *start, const struct argument *a) {
    struct pollfd pipe = {.fd = start->slots[a[0].number], .events = POLLIN};
    int ready = poll(&pipe, 1, 0);
    if (ready > 0)
        errno = EPIPE;
    return ready == 0 ? 0 : -1;
}

/* slot: a control group of version 2 that the new process is to begin in. To move it there later would have
 * the kernel hold up all forks and ends of processes on the machine until each processor has taken notice. */
int op_into(struct start *start, const struct argument *a) {
    start->group = start->slots[a[0].number];
    return 0;
}

/* slot: moves this process into that group, unless it began there */
int op_join(struct start *start, const struct argument *a) {
    if (start->joined)
        return 0;
    int fd = openat(start->slots[a[0].number], "cgroup.procs", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int failed = write(fd, "0", 1) == 1 ? 0 : -1, number = errno;
    close(fd);
    errno = number;
    return failed;
}

/* bytes: what PID 1 shows to the filter when it marks commands */
int op_key(struct start *start, const struct argument *a) {
    (void)start;
    if (a[0].size != TREE_KEY_BYTES) {
        errno = EBADMSG;
        return -1;
    }
    tree_set_key(a[0].text);
    return 0;
}

/* instructions */
int op_seccomp(struct start *start, const struct argument *a) {
    (void)start;
    struct sock_fprog program = {
        .len = (unsigned short)(a[0].size / sizeof(struct sock_filter)),
        .filter = (struct sock_filter *)(void *)a[0].text, /* The kernel takes it from any address. */
    };
    return prctl(PR_SET_SECCOMP, (unsigned long)SECCOMP_MODE_FILTER, &program, 0UL, 0UL);
}
