/* Starts a command's first process, joined to this one by pipes or a terminal and by nothing else. */
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NOT_ON_PATH = -1, STOPPED = -2, NOT_THAT_USER = -3 };
enum { STACK_BYTES = 64 << 10, GUARD_BYTES = 64 << 10 };
/* From its copy to its program a child takes a fraction of a millisecond, and on a busy host longer than any
 * number says; after so long it is asked whether it was stopped. See `follow`. */
enum { ASK_MILLISECONDS = 500 };
static const char OOM_SCORE[] = "500", ANOTHER[] = "its process could not become that user";

bool spawner_open(struct spawner *spawner, int oom_score_fd) {
    /* The child's three numbers are taken here, so that none of its ends lies on another's place. */
    do
        spawner->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (spawner->null >= 0 && spawner->null < 3);
    spawner->oom_score_fd = oom_score_fd;
    char *score = spawner->oom_score;
    if (oom_score_fd < 0 || pread(oom_score_fd, score, sizeof spawner->oom_score - 1, 0) <= 0)
        strcpy(score, "0");
    tagger_open(&spawner->tagger);
    identity_open();
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK;
    char *low = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_NONE, kind, -1, 0);
    if (low == MAP_FAILED || mprotect(low + GUARD_BYTES, STACK_BYTES, PROT_READ | PROT_WRITE) != 0)
        return false;
    spawner->stack = low + GUARD_BYTES + STACK_BYTES;
    return spawner->null >= 0;
}

/* -- ends */

static void shut(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void close_theirs(struct ends *ends) {
    for (int n = 0; n < 3; n++)
        shut(&ends->theirs[n]);
}

void spawn_disconnect(struct ends *ends) {
    close_theirs(ends);
    shut(&ends->input);
    for (int n = 0; n < 2; n++)
        shut(&ends->outputs[n]);
    ends->terminal = -1;
}

static bool open_pipe(int *read_end, int *write_end) {
    int both[2];
    if (pipe2(both, O_CLOEXEC) != 0)
        return false;
    *read_end = both[0];
    *write_end = both[1];
    return true;
}

static bool open_pipes(bool has_stdin, struct ends *ends) {
    return (!has_stdin || open_pipe(&ends->theirs[0], &ends->input)) &&
           open_pipe(&ends->outputs[0], &ends->theirs[1]) && open_pipe(&ends->outputs[1], &ends->theirs[2]);
}

void terminal_resize(int terminal, uint16_t rows, uint16_t columns) {
    struct winsize size = {.ws_row = rows, .ws_col = columns};
    ioctl(terminal, TIOCSWINSZ, &size);
}

static bool open_terminal(const struct exec_request *request, struct ends *ends) {
    int unlocked = 0, number;
    ends->outputs[0] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (ends->outputs[0] < 0 || ioctl(ends->outputs[0], TIOCSPTLCK, &unlocked) != 0 ||
        ioctl(ends->outputs[0], TIOCGPTN, &number) != 0)
        return false;
    ends->terminal = ends->outputs[0];
    snprintf(ends->terminal_name, sizeof ends->terminal_name, "/dev/pts/%d", number);
    terminal_resize(ends->terminal, request->rows, request->columns);
    /* Its own number, for input and output are watched apart. */
    ends->input = fcntl(ends->terminal, F_DUPFD_CLOEXEC, 3);
    return ends->input >= 0;
}

bool spawn_connect(const struct spawner *spawner, const struct launch *launch, struct ends *ends,
                   struct fault *fault) {
    *ends = (struct ends){
        .null = spawner->null, .theirs = {-1, -1, -1}, .terminal = -1, .input = -1, .outputs = {-1, -1}};
    const struct exec_request *request = launch->request;
    int death_signal;
    if (!identity_put_on(launch->identity, &death_signal))
        return fault_say(fault, EPERM, ANOTHER);
    bool made = request->rows != 0 ? open_terminal(request, ends) : open_pipes(request->has_stdin, ends);
    int number = errno;
    identity_take_off(launch->identity, death_signal);
    if (!made) {
        spawn_disconnect(ends);
        return fault_os(fault, number);
    }
    for (int n = 0; n < 2; n++)
        if (ends->outputs[n] >= 0)
            fcntl(ends->outputs[n], F_SETFL, O_NONBLOCK);
    if (ends->input >= 0)
        fcntl(ends->input, F_SETFL, O_NONBLOCK);
    return true;
}

/* -- the child */

struct child {
    const struct exec_request *request;
    const struct identity *identity;
    const struct ends *ends;
    int told; /* Where it says why there is no program; -1: nobody reads before its end. */
    int why;
    bool outside; /* It could not enter its working directory. */
};

static IN_CHILD bool is_program(const char *path) {
    struct stat status;
    return access(path, X_OK) == 0 && stat(path, &status) == 0 && !S_ISDIR(status.st_mode);
}

/* The program that a shell would run for this name; 0 or an error. `found` holds PATH_MAX bytes. */
static IN_CHILD int search(const char *name, const char *path, char *found) {
    size_t length = strlen(name);
    for (const char *end; *name != 0; path = end + 1) {
        end = strchrnul(path, ':');
        size_t directory = (size_t)(end - path);
        if (directory + length + 3 <= PATH_MAX) {
            memcpy(found, path, directory);
            if (directory == 0)
                found[directory++] = '.';
            if (found[directory - 1] != '/')
                found[directory++] = '/';
            memcpy(found + directory, name, length + 1);
            if (is_program(found))
                return 0;
        }
        if (*end == 0)
            break;
    }
    return NOT_ON_PATH;
}

static IN_CHILD bool take_ends(const struct ends *ends) {
    if (ends->terminal < 0) {
        for (int n = 0; n < 3; n++)
            if (dup2(ends->theirs[n] >= 0 ? ends->theirs[n] : ends->null, n) < 0)
                return false;
        return true;
    }
    /* Opened anew, not handed down: opening it is what makes it the new session's terminal. */
    int terminal = open(ends->terminal_name, O_RDWR | O_CLOEXEC);
    return terminal >= 0 && dup2(terminal, 0) == 0 && dup2(terminal, 1) == 1 && dup2(terminal, 2) == 2;
}

/* Returns only with an error. */
static IN_CHILD int become(struct child *child) {
    const struct exec_request *request = child->request;
    char found[PATH_MAX];
    /* This process ignores these two; it blocks what it waits for. */
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    setsid();
    if (!identity_become(child->identity))
        return NOT_THAT_USER;
    child->outside = chdir(request->cwd) != 0;
    if (child->outside || !take_ends(child->ends))
        return errno;
    const char *program = request->argv[0];
    if (strchr(program, '/') == NULL) {
        if (search(program, request->path, found) != 0)
            return NOT_ON_PATH;
        program = found;
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execve(program, request->argv, request->env);
    return errno;
}

static IN_CHILD int run(void *context) {
    struct child *child = context;
    child->why = become(child);
    if (child->told >= 0 && write(child->told, &child->why, sizeof child->why) < 0)
        _exit(126);
    _exit(127);
}

/* -- this side */

/* So that a full memory limit takes the command and not PID 1, which is the sandbox. */
static void set_oom_score(const struct spawner *spawner, const char *score) {
    if (spawner->oom_score_fd >= 0 && pwrite(spawner->oom_score_fd, score, strlen(score), 0) < 0)
        return; /* The host may not let it be raised; then they die by size. */
}

static bool is_stopped(pid_t pid) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* Waits until the child has a memory of its own: `heard` ends when its program begins, or when it has ended.
 * Returns 0, or why there is no program. A command may stop every process in the sandbox, a child on its way
 * among them, and this one must not wait for it for ever; for one that only waits for a processor it does. */
static int follow(pid_t pid, int heard) {
    struct pollfd end = {.fd = heard, .events = POLLIN};
    int why = 0;
    while (poll(&end, 1, ASK_MILLISECONDS) == 0 && why == 0)
        if (is_stopped(pid)) {
            kill(pid, SIGKILL);
            why = STOPPED;
        }
    for (int told;;) {
        ssize_t count = read(heard, &told, sizeof told);
        if (count == 0)
            return why;
        if (count == sizeof told && why == 0) {
            why = told;
            kill(pid, SIGKILL); /* It may be stopped before it ends by itself. */
        }
    }
}

/* Whether this is a sandbox's first process and no other is in it: all of them descend from the first. */
static bool is_alone(void) {
    siginfo_t info;
    return getpid() == 1 && waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) != 0 &&
           errno == ECHILD;
}

/* Where nobody is who could stop the child, this process may be held up in the kernel until it has a memory
 * of its own. That spares the pipe, and the kernel does not come to know this memory as one that processes
 * share: each change of an OOM score would then look at every process of the host. */
static pid_t start_alone(const struct spawner *spawner, struct child *child, int *error) {
    pid_t pid = clone(run, spawner->stack, CLONE_VM | CLONE_VFORK | SIGCHLD, child);
    *error = pid < 0 ? errno : child->why;
    return pid;
}

static pid_t start(const struct spawner *spawner, struct child *child, int *error) {
    int heard;
    if (is_alone())
        return start_alone(spawner, child, error);
    if (!open_pipe(&heard, &child->told)) {
        *error = errno;
        return -1;
    }
    /* Not vfork: it would hold this process up in the kernel for as long as the child is stopped. */
    pid_t pid = clone(run, spawner->stack, CLONE_VM | SIGCHLD, child);
    *error = pid < 0 ? errno : 0;
    close(child->told);
    if (pid >= 0)
        *error = follow(pid, heard);
    close(heard);
    return pid;
}

static void tell_fault(const struct child *child, int error, struct fault *fault) {
    if (error == NOT_ON_PATH)
        fault_say(fault, ENOENT, "not found on PATH");
    else if (error == STOPPED)
        fault_say(fault, ETIMEDOUT, "its process was stopped before the program began");
    else if (error == NOT_THAT_USER)
        fault_say(fault, EPERM, ANOTHER);
    else
        fault_os(fault, error);
    if (child->outside)
        fault_about(fault, "working directory ", child->request->cwd);
    else
        fault_about(fault, "", child->request->argv[0]);
}

pid_t spawn(struct spawner *spawner, const struct launch *launch, struct ends *ends, uint64_t *tag,
            struct fault *fault) {
    struct child child = {launch->request, launch->identity, ends, -1, 0, false};
    int error = 0;
    set_oom_score(spawner, OOM_SCORE);
    *tag = tagger_take(&spawner->tagger);
    pid_t pid = start(spawner, &child, &error);
    identity_close(launch->identity);
    tagger_drop(&spawner->tagger);
    set_oom_score(spawner, spawner->oom_score);
    if (error == 0) {
        close_theirs(ends);
        return pid;
    }
    tell_fault(&child, error, fault);
    return -1;
}
