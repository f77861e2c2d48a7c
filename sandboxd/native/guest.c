/* The first process of a sandbox: takes the daemon's connections, starts commands, and reaps every orphan. */
#include "guest.h"

#include "command.h"
#include "named.h"
#include "peer.h"
#include "transfer.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* Before connections are taken again when no descriptor was free for one. */
static const double ACCEPT_PAUSE_SECONDS = 0.05;
/* Allocations from this size on go back to the system when they are freed. */
enum { MAPPED_BYTES = 256 << 10 };

struct guest {
    struct loop loop;
    struct commands commands;
    struct named named;
    struct timer pause;
    int listener, signals;
};

/* -- commands of a connection of their own */

/* The command of one connection, which ends with it. */
struct direct {
    struct operation operation;
    struct outlet outlet;
    struct peer *peer;
    struct command *command; /* NULL: it could not be started. */
};

static struct direct *direct_of(struct outlet *outlet) {
    return (struct direct *)((char *)outlet - offsetof(struct direct, outlet));
}

static bool direct_congested(struct outlet *outlet) {
    return peer_congested(direct_of(outlet)->peer);
}

static void direct_started(struct outlet *outlet, uint32_t pid) {
    char number[4];
    wire_put32(number, pid);
    peer_send(direct_of(outlet)->peer, WIRE_STARTED, (struct iovec){number, 4}, (struct iovec){0});
}

static void direct_output(struct outlet *outlet, char kind, uint64_t offset, struct iovec data) {
    char number[8];
    wire_put64(number, offset);
    peer_send(direct_of(outlet)->peer, kind, (struct iovec){number, 8}, data);
}

static void direct_ended(struct outlet *outlet, struct iovec payload) {
    peer_send(direct_of(outlet)->peer, WIRE_EXITED, payload, (struct iovec){0});
}

static void direct_hold_input(struct outlet *outlet, bool full) {
    struct peer *peer = direct_of(outlet)->peer;
    if (full && !peer->paused)
        peer_pause(peer);
    else if (!full && peer->paused)
        peer_resume(peer);
}

static bool direct_received(struct operation *operation, char kind, const char *payload, size_t size) {
    return command_received(((struct direct *)operation)->command, kind, payload, size);
}

static void direct_drained(struct operation *operation) {
    command_drained(((struct direct *)operation)->command);
}

static void direct_closed(struct operation *operation) {
    struct direct *direct = (struct direct *)operation;
    command_abandon(direct->command);
    command_leave(direct->command);
    loop_bury(direct->peer->loop, direct, free);
}

static bool begin_command(struct guest *guest, struct peer *peer, const char *payload, size_t size) {
    static const struct operation_kind DIRECT = {direct_received, direct_drained, direct_closed};
    static const struct outlet_kind OUTLET = {direct_congested, direct_started, direct_output, direct_ended,
                                              direct_hold_input};
    struct exec_request request;
    if (!exec_request_read(&request, payload, size))
        return false;
    struct direct *direct = memory_get(sizeof *direct);
    *direct = (struct direct){{&DIRECT}, {&OUTLET}, peer, NULL};
    direct->command = command_start(&guest->commands, &request, &direct->outlet);
    exec_request_free(&request);
    if (direct->command != NULL) {
        peer->operation = &direct->operation;
    } else {
        peer->operation = &operation_over;
        free(direct);
    }
    return true;
}

/* -- connections */

static bool begin(void *context, struct peer *peer, char kind, const char *payload, size_t size) {
    struct guest *guest = context;
    if (kind == WIRE_EXEC)
        return begin_command(guest, peer, payload, size);
    if (kind == WIRE_WATCH)
        return true;
    if (kind == WIRE_PING) {
        /* One that asks and does not hear would fill the memory with answers. */
        if (buffer_size(&peer->pending) > WIRE_PIECE)
            return false;
        /* Says back what it is asked: that connections are kept, of which an older guest knows nothing. */
        peer_send(peer, WIRE_PING, (struct iovec){(char *)payload, size < 1 ? size : 1}, (struct iovec){0});
        return true;
    }
    if (named_is(kind))
        return named_begin(&guest->named, peer, kind, payload, size);
    return transfer_begin(peer, kind, payload, size);
}

/* A container's processes can reach the socket of their first one, whose powers are not theirs: it has no
 * limits of theirs, and answers for none. Whoever is outside of the pid namespace has no number in here;
 * where all numbers are made up (gVisor) it is this process's own. */
static bool is_inside(int fd) {
    struct ucred other;
    socklen_t size = sizeof other;
    return getpid() == 1 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 && other.pid > 1;
}

static void accept_all(void *context, uint32_t mask);

static void accept_again(void *context) {
    struct guest *guest = context;
    if (!loop_watch(&guest->loop, guest->listener, LOOP_IN, accept_all, guest))
        loop_after(&guest->loop, &guest->pause, ACCEPT_PAUSE_SECONDS, accept_again, guest);
}

static void accept_all(void *context, uint32_t mask) {
    struct guest *guest = context;
    (void)mask;
    for (;;) {
        int fd = accept4(guest->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0 && is_inside(fd)) {
            close(fd);
            continue;
        }
        if (fd >= 0) {
            peer_open(&guest->loop, fd, begin, guest);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno == EAGAIN)
            return;
        loop_unwatch(&guest->loop, guest->listener);
        loop_after(&guest->loop, &guest->pause, ACCEPT_PAUSE_SECONDS, accept_again, guest);
        return;
    }
}

/* -- the process */

/* Whether the end is asked for by who may. Of a sandbox's first process only those outside of its pid
 * namespace, whose number is 0 in here; the code tells them from the kernel and from sigqueue(3), which may
 * bring any number. */
static bool from_outside(const struct signalfd_siginfo *info) {
    return getpid() != 1 || (info->ssi_code == SI_USER && info->ssi_pid == 0);
}

static void signaled(void *context, uint32_t mask) {
    struct guest *guest = context;
    struct signalfd_siginfo info;
    (void)mask;
    while (read(guest->signals, &info, sizeof info) == sizeof info)
        if (info.ssi_signo == SIGTERM && from_outside(&info))
            loop_stop(&guest->loop);
    commands_reap(&guest->commands);
}

static void lifeline_ended(void *context, uint32_t mask) {
    (void)mask;
    loop_stop(&((struct guest *)context)->loop);
}

/* Nothing that is ignored or blocked here is handed down (what came ignored, `main` forgot); what is waited
 * for comes as an event. */
static bool watch_signals(struct guest *guest) {
    sigset_t awaited;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigprocmask(SIG_SETMASK, &awaited, NULL);
    guest->signals = signalfd(-1, &awaited, SFD_NONBLOCK | SFD_CLOEXEC);
    return guest->signals >= 0;
}

/* No command gets a descriptor of this process, and no connection is waited for. */
static void keep_own(int listener, struct memory_files memory, int lifeline, int oom_score_fd) {
    int own[] = {listener, memory.kills, memory.peak, memory.limit, lifeline, oom_score_fd};
    for (size_t n = 0; n < sizeof own / sizeof *own; n++)
        if (own[n] >= 0)
            fcntl(own[n], F_SETFD, FD_CLOEXEC);
    fcntl(listener, F_SETFL, O_NONBLOCK);
}

/* No new privileges for anything started here, and nobody inside may read or trace this process. */
static bool lock_down(void) {
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_DUMPABLE, GUEST_DUMPABLE, 0, 0, 0) == 0;
}

int guest_serve(int listener, struct memory_files memory, int lifeline, int oom_score_fd) {
    static struct guest guest;
    mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES);
    mallopt(M_TRIM_THRESHOLD, MAPPED_BYTES);
    keep_own(listener, memory, lifeline, oom_score_fd);
    guest.listener = listener;
    guest.named.commands = &guest.commands;
    if (!lock_down() || !loop_open(&guest.loop) || !watch_signals(&guest) ||
        !commands_open(&guest.commands, &guest.loop, memory, oom_score_fd))
        return 1;
    if (!loop_watch(&guest.loop, guest.signals, LOOP_IN, signaled, &guest) ||
        !loop_watch(&guest.loop, listener, LOOP_IN, accept_all, &guest) ||
        (lifeline >= 0 && !loop_watch(&guest.loop, lifeline, LOOP_IN, lifeline_ended, &guest)))
        return 1;
    loop_run(&guest.loop);
    return 0;
}
