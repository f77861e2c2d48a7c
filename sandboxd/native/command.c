/* The commands that run: how each begins, and who of them has ended. */
#include "command.h"

#include "memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* What a terminal's user types to end the input. */
static const char END_OF_FILE[] = "\x04";

static bool none_congested(struct outlet *outlet) {
    (void)outlet;
    return false;
}

static void none_started(struct outlet *outlet, uint32_t pid) {
    (void)outlet, (void)pid;
}

static void none_output(struct outlet *outlet, char kind, uint64_t offset, struct iovec data) {
    (void)outlet, (void)kind, (void)offset, (void)data;
}

static void none_ended(struct outlet *outlet, struct iovec payload) {
    (void)outlet, (void)payload;
}

static void none_hold(struct outlet *outlet, bool full) {
    (void)outlet, (void)full;
}

static const struct outlet_kind NONE = {none_congested, none_started, none_output, none_ended, none_hold};
struct outlet outlet_none = {&NONE};

bool commands_open(struct commands *table, struct loop *loop, struct memory_files memory, int oom_score_fd) {
    *table = (struct commands){.loop = loop, .memory = memory};
    return spawner_open(&table->spawner, oom_score_fd);
}

/* -- the begin */

static void tell_not_started(struct outlet *outlet, const struct fault *fault) {
    int code = fault->number == ENOENT || fault->number == ENOTDIR ? 127 : 126;
    command_tell_end(NULL, outlet, NOT_STARTED, code, fault->text);
}

static void timed_out(void *context) {
    command_kill(context, TIMED_OUT);
}

/* Before anything of it runs: a place in the loop for each of its ends, or nothing is started. */
static struct command *connect(struct commands *table, const struct exec_request *request,
                               struct outlet *outlet, const struct ends *ends) {
    struct command *command = memory_get(sizeof *command);
    *command = (struct command){
        .table = table, .outlet = outlet, .oom_before = memory_kills(&table->memory), .tree_dead = true,
        .budget = {request->output_limit, request->output_tail}, .input_ended = !request->has_stdin,
        .stdin_fd = ends->input, .terminal = ends->terminal,
    };
    for (int n = 0; n < 2; n++) {
        char kind = n == 0 ? WIRE_STDOUT : WIRE_STDERR;
        command->streams[n] =
            (struct stream){.command = command, .last_bytes = -1, .fd = ends->outputs[n], .kind = kind};
    }
    return command;
}

/* Tells that the command runs, and begins to hear and to feed it. */
static void begin(struct command *command, const struct exec_request *request) {
    struct commands *table = command->table;
    struct command **bucket = &table->buckets[(unsigned)command->pid % COMMAND_BUCKETS];
    command->next = *bucket;
    *bucket = command;
    command->began = loop_now();
    if (request->timeout >= 0)
        loop_after(table->loop, &command->timer, request->timeout, timed_out, command);
    command->outlet->kind->started(command->outlet, (uint32_t)command->pid);
    command_watch_streams(command);
    if (command->terminal >= 0 && command->input_ended) {
        buffer_add(&command->input, END_OF_FILE, 1);
        command_feed(command);
    }
}

/* NULL with the fault. */
static struct command *launch(struct commands *table, const struct launch *launch, struct outlet *outlet,
                              struct fault *fault) {
    const char *program = launch->request->argv[0];
    struct ends ends;
    if (!spawn_connect(&table->spawner, launch, &ends, fault)) {
        fault_about(fault, "", program);
        return NULL;
    }
    struct command *command = connect(table, launch->request, outlet, &ends);
    command->pid = -1;
    if (!command_take_places(command)) {
        fault_os(fault, errno);
        fault_about(fault, "", program);
    } else {
        command->pid = spawn(&table->spawner, launch, &ends, &command->tag, fault);
    }
    if (command->pid > 0)
        return command;
    command_give_places(command);
    spawn_disconnect(&ends);
    free(command);
    return NULL;
}

/* Unless the caller said another. */
static void give_home(const struct exec_request *request, const struct identity *identity) {
    char **variable = request->env;
    for (; *variable != NULL; variable++)
        if (strncmp(*variable, "HOME=", 5) == 0)
            return;
    variable[0] = identity->home;
    variable[1] = NULL;
}

struct command *command_start(struct commands *table, const struct exec_request *request,
                              struct outlet *outlet) {
    struct identity identity;
    struct fault fault;
    struct command *command = NULL;
    if (identity_find(&identity, request->user, &fault)) {
        if (identity.given)
            give_home(request, &identity);
        command = launch(table, &(struct launch){request, &identity}, outlet, &fault);
        identity_free(&identity);
    }
    if (command != NULL)
        begin(command, request);
    else
        tell_not_started(outlet, &fault);
    return command;
}

/* -- the end of processes */

static struct command *take(struct commands *table, pid_t pid) {
    struct command **place = &table->buckets[(unsigned)pid % COMMAND_BUCKETS];
    for (; *place != NULL; place = &(*place)->next) {
        struct command *found = *place;
        if (found->pid != pid)
            continue;
        *place = found->next;
        return found;
    }
    return NULL;
}

static double seconds(const struct timeval *time) {
    return (double)time->tv_sec + (double)time->tv_usec / 1e6;
}

void commands_reap(struct commands *table) {
    for (;;) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0)
            return;
        struct command *command = take(table, pid);
        if (command != NULL)
            command_ended(command, status, seconds(&usage.ru_utime) + seconds(&usage.ru_stime));
    }
}

/* -- what its owner says */

void command_drained(struct command *command) {
    command_watch_streams(command);
    for (int n = 0; n < 2; n++)
        command_read_rest(&command->streams[n]);
    command_finish_if_done(command);
}

void command_abandon(struct command *command) {
    if (command->over)
        return;
    command_discard_output(command);
    command_kill(command, SIGNALED);
}

static void release(void *object) {
    struct command *command = object;
    buffer_free(&command->input);
    for (int n = 0; n < 2; n++)
        buffer_free(&command->streams[n].trimmer.tail);
    free(command);
}

void command_leave(struct command *command) {
    command->outlet = &outlet_none;
    command->left = true;
    if (command->over)
        loop_bury(command->table->loop, command, release);
}
