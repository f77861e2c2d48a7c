/* A small child of the launcher that takes its orders and starts the sandboxes: a copy of this process costs
 * next to nothing, and carries nothing.
 *
 * The control socket keeps messages apart; numbers are of this machine's order.
 *     b NUMBER(1) STEPS                    a block that later steps name
 *     o STEPS                              steps for this process, before the first start
 *     s SIZE(4) STEPS STEPS                start: SIZE bytes are for this process, the others for the
 *                                          sandbox's first → s PID(4), or f and what failed
 *     k PID(4)                             kill
 *                                          → e PID(4) STATUS(4) once a sandbox's first process has ended
 *                                          → d NAME and a descriptor, from a sandbox on its way
 * Starts are answered in order. Nothing is read, and no child reaped, while an answer waits to be taken. */
#include "starter.h"

#include "guest.h"
#include "ops.h"
#include "reaper.h"
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ORDER_BYTES = 1 << 16, ARENA_BYTES = 1 << 18, ANSWER_BYTES = WHAT + 128 };

struct starter {
    int control, children, lifeline;
    int inherited[SLOTS];
    struct block blocks[BLOCKS];
    unsigned char *order, *arena; /* the message in hand; the blocks, which lie behind it */
    size_t arena_used;
    char answer[ANSWER_BYTES];
    size_t answer_size;
    struct reaper reaper;
    int reaping; /* children may have ended that were not waited for yet */
};

static void flush(struct starter *starter) {
    if (starter->answer_size == 0)
        return;
    if (send(starter->control, starter->answer, starter->answer_size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS)
            return;
        _exit(0); /* The launcher is gone, and its sandboxes go with this process. */
    }
    memset(starter->answer, 0, starter->answer_size);
    starter->answer_size = 0;
}

static void answer(struct starter *starter, char kind, const void *body, size_t size) {
    starter->answer[0] = kind;
    memcpy(starter->answer + 1, body, size);
    starter->answer_size = size + 1;
    flush(starter);
}

static void answer_failed(struct starter *starter, int number, const char *what) {
    char text[ANSWER_BYTES - 1];
    int size = snprintf(text, sizeof text, "%s: %s", strerror(number), what);
    answer(starter, 'f', text, size < (int)sizeof text ? (size_t)size : sizeof text - 1);
}

/* Leaves the reason in the sandbox's directory, where the launcher looks for it. */
static void leave_error(const struct start *start, int number) {
    char text[ANSWER_BYTES];
    int size = snprintf(text, sizeof text, "%s (%s)", strerror(number), start->what);
    int fd = openat(start->slots[SLOT_HOME], "error", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, text, size < (int)sizeof text ? (size_t)size : sizeof text - 1) < 0)
        fprintf(stderr, "sandboxd-starter: %s\n", text);
}

/* The first process of a sandbox, from its first moment on. */
static _Noreturn void become_guest(const struct starter *starter, struct start *start,
                                   const unsigned char *steps, size_t size) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* For the time until the steps say so for good: a change of rights clears it. */
    prctl(PR_SET_PDEATHSIG, (unsigned long)SIGKILL, 0UL, 0UL, 0UL);
    int failed = steps_run(start, steps, size);
    if (failed) {
        leave_error(start, failed);
        _exit(1);
    }
    /* Orders speak of the host. */
    munmap(starter->order, ORDER_BYTES + ARENA_BYTES);
    const int *slots = start->slots;
    struct memory_files memory = {slots[SLOT_KILLS], slots[SLOT_PEAK], slots[SLOT_LIMIT]};
    _exit(guest_serve(slots[SLOT_LISTENER], memory, slots[SLOT_LIFELINE], slots[SLOT_OOM_SCORE]));
}

static void close_own(const struct start *start) {
    for (int slot = SLOT_LISTENER; slot < SLOT_INHERITED; slot++)
        if (start->slots[slot] >= 0)
            close(start->slots[slot]);
}

/* Copies this process: the copy is the first of a pid namespace, and in its control group where the kernel
 * can do that at once (5.7). Returns the pid, 0 in the copy, -1 with errno. */
static pid_t copy(struct start *start) {
    if (start->group >= 0) {
        struct clone_args how = {.flags = CLONE_NEWPID | CLONE_INTO_CGROUP, .exit_signal = SIGCHLD};
        how.cgroup = (uint64_t)start->group;
        start->joined = 1;
        pid_t pid = (pid_t)syscall(SYS_clone3, &how, sizeof how);
        if (pid >= 0 || errno != ENOSYS)
            return pid;
        start->joined = 0;
    }
    return (pid_t)syscall(SYS_clone, (unsigned long)(CLONE_NEWPID | SIGCHLD), 0UL, 0UL, 0UL, 0UL);
}

static void start_one(struct starter *starter, const unsigned char *body, size_t size) {
    struct start start = {.control = starter->control, .group = -1, .what = "order"};
    start.blocks = starter->blocks;
    uint32_t ours;
    memcpy(start.slots, starter->inherited, sizeof start.slots);
    if (size < sizeof ours || (memcpy(&ours, body, sizeof ours), ours > size - sizeof ours)) {
        answer_failed(starter, EBADMSG, start.what);
        return;
    }
    const unsigned char *steps = body + sizeof ours, *theirs = steps + ours;
    int failed = steps_run(&start, steps, ours);
    int32_t pid = 0;
    if (!failed) {
        pid = copy(&start);
        if (pid == 0)
            become_guest(starter, &start, theirs, (size_t)(body + size - theirs));
        if (pid < 0) {
            failed = errno;
            snprintf(start.what, WHAT, "clone");
        }
    }
    close_own(&start);
    if (failed)
        answer_failed(starter, failed, start.what);
    else
        answer(starter, 's', &pid, sizeof pid);
}

static void define(struct starter *starter, const unsigned char *body, size_t size) {
    if (size == 0 || body[0] >= BLOCKS || size - 1 > ARENA_BYTES - starter->arena_used) {
        fprintf(stderr, "sandboxd-starter: a block of %zu bytes has no room\n", size);
        _exit(2);
    }
    unsigned char *place = starter->arena + starter->arena_used;
    memcpy(place, body + 1, size - 1);
    starter->arena_used += size - 1;
    starter->blocks[body[0]] = (struct block){place, size - 1};
}

/* For this process, and what its copies inherit of it. */
static void prepare_copies(struct starter *starter, const unsigned char *steps, size_t size) {
    struct start start = {.control = starter->control, .group = -1, .blocks = starter->blocks};
    memcpy(start.slots, starter->inherited, sizeof start.slots);
    int failed = steps_run(&start, steps, size);
    if (failed == 0)
        return;
    fprintf(stderr, "sandboxd-starter: %s: %s\n", strerror(failed), start.what);
    _exit(2);
}

/* Of a child that was not waited for the number cannot be somebody else's. */
static void kill_child(struct starter *starter, const unsigned char *body, size_t size) {
    int32_t pid;
    siginfo_t found;
    if (size != sizeof pid)
        return;
    memcpy(&pid, body, sizeof pid);
    if (pid > 0 && waitid(P_PID, (id_t)pid, &found, WEXITED | WNOHANG | WNOWAIT) == 0) {
        kill(pid, SIGKILL);
        reaper_await(&starter->reaper, pid);
    }
}

static void receive(struct starter *starter) {
    ssize_t size = recv(starter->control, starter->order, ORDER_BYTES, MSG_DONTWAIT | MSG_TRUNC);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0)
        _exit(0);
    if (size > ORDER_BYTES) {
        fprintf(stderr, "sandboxd-starter: an order of %zd bytes is too long\n", size);
        _exit(2);
    }
    const unsigned char *body = starter->order + 1;
    if (starter->order[0] == 's')
        start_one(starter, body, (size_t)size - 1);
    else if (starter->order[0] == 'b')
        define(starter, body, (size_t)size - 1);
    else if (starter->order[0] == 'o')
        prepare_copies(starter, body, (size_t)size - 1);
    else if (starter->order[0] == 'k')
        kill_child(starter, body, (size_t)size - 1);
    /* The next child must not find what this one was made of. */
    memset(starter->order, 0, (size_t)size);
}

static void reap(struct starter *starter) {
    while (starter->reaping && starter->answer_size == 0) {
        int status;
        pid_t pid = reaper_next(&starter->reaper, &status);
        if (pid == 0) {
            starter->reaping = 0;
            return;
        }
        int32_t ended[2] = {pid, status};
        answer(starter, 'e', ended, sizeof ended);
    }
}

static _Noreturn void serve(struct starter *starter) {
    for (;;) {
        int waits = starter->answer_size != 0;
        struct pollfd polled[] = {
            {.fd = starter->control, .events = waits ? POLLOUT : POLLIN},
            {.fd = waits ? -1 : starter->children, .events = POLLIN},
        };
        if (poll(polled, 2, waits ? -1 : reaper_patience(&starter->reaper)) < 0 && errno != EINTR)
            _exit(2);
        flush(starter);
        if (reaper_patience(&starter->reaper) == 0)
            starter->reaping = 1;
        if (polled[1].revents) {
            struct signalfd_siginfo child;
            if (read(starter->children, &child, sizeof child) > 0) {
                reaper_signaled(&starter->reaper, (pid_t)child.ssi_pid);
                starter->reaping = 1;
            }
        }
        reap(starter);
        if (starter->answer_size == 0 && !waits && polled[0].revents)
            receive(starter);
    }
}

static int map_orders(struct starter *starter) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS;
    void *place = mmap(NULL, ORDER_BYTES + ARENA_BYTES, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (place == MAP_FAILED)
        return -1;
    starter->order = place;
    starter->arena = starter->order + ORDER_BYTES;
    return 0;
}

/* Its guests hold the other end, and end when this process has. */
static int make_lifeline(struct starter *starter) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return -1;
    starter->inherited[SLOT_LIFELINE] = ends[0];
    starter->lifeline = ends[1];
    return 0;
}

static int prepare(struct starter *starter, int argc, char **argv) {
    for (int slot = 0; slot < SLOTS; slot++)
        starter->inherited[slot] = -1;
    starter->inherited[SLOT_HERE] = AT_FDCWD;
    for (int slot = SLOT_INHERITED; slot < SLOT_INHERITED + argc; slot++)
        starter->inherited[slot] = atoi(argv[slot - SLOT_INHERITED]);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    starter->children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    return starter->children < 0 || map_orders(starter) != 0 ? -1 : make_lifeline(starter);
}

int starter_main(int argc, char **argv) {
    static struct starter starter;
    if (argc < 4 || argc - 4 > SLOTS - SLOT_INHERITED) {
        fputs("usage: sandboxd-guest starter LAUNCHER_PID CONTROL_FD FD...\n", stderr);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, (unsigned long)SIGKILL, 0UL, 0UL, 0UL);
    /* It may have ended before that. */
    if (getppid() != atoi(argv[2]))
        return 1;
    starter.control = atoi(argv[3]);
    if (prepare(&starter, argc - 4, argv + 4) != 0) {
        perror("sandboxd-starter");
        return 2;
    }
    title_find(argc, argv);
    title_set("sandboxd-starter");
    serve(&starter);
}
