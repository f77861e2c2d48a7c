/* How a command ends: by itself, with what is left of its output, or killed with all that it started. */
#include "command.h"

#include "disk.h"
#include "memory.h"

#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

/* A background child that keeps the output open delays the end by no more than this. */
static const double GRACE_SECONDS = 0.2;
/* Between two looks at a tree that does not die at once, and how long to keep looking. */
static const double KILL_PAUSE_SECONDS = 0.002, KILL_PATIENCE_SECONDS = 5.0;

static bool reads(const struct command *command) {
    return command->streams[0].fd >= 0 || command->streams[1].fd >= 0;
}

/* The grace is over: what is in the pipes now is the last that is read. */
static void stop_waiting(void *context) {
    struct command *command = context;
    for (int n = 0; n < 2; n++) {
        struct stream *stream = &command->streams[n];
        int waiting = 0;
        if (stream->fd < 0)
            continue;
        if (ioctl(stream->fd, FIONREAD, &waiting) != 0)
            waiting = 0;
        stream->last_bytes = waiting;
        if (waiting != 0) {
            command_read_rest(stream);
            continue;
        }
        command_send_tail(stream);
        command_close_stream(stream);
    }
    command_finish_if_done(command);
}

void command_ended(struct command *command, int status, double cpu) {
    command->reaped = true;
    command->status = status;
    command->cpu = cpu;
    command->wall = loop_now() - command->began;
    if (!command->killing) {
        loop_cancel(command->table->loop, &command->timer);
        /* What it wrote before may still be in the pipes. */
        for (int n = 0; n < 2; n++)
            command_read(&command->streams[n]);
        if (reads(command) && !command->killing)
            loop_after(command->table->loop, &command->timer, GRACE_SECONDS, stop_waiting, command);
    }
    command_finish_if_done(command);
}

static void kill_again(void *context) {
    struct command *command = context;
    struct loop *loop = command->table->loop;
    command->tree_dead = tree_kill(command->tag, command->reaped ? 0 : command->pid);
    if (!command->tree_dead && loop_now() > command->kill_by)
        command->tree_dead = command->survivors = true;
    if (!command->tree_dead)
        loop_after(loop, &command->timer, KILL_PAUSE_SECONDS, kill_again, command);
    else if (command->reaped || reads(command))
        loop_after(loop, &command->timer, GRACE_SECONDS, stop_waiting, command);
    command_finish_if_done(command);
}

/* Ends the whole tree and remembers why. */
void command_kill(struct command *command, enum reason reason) {
    if (command->over || command->killing)
        return;
    loop_cancel(command->table->loop, &command->timer);
    if (!command->reaped)
        command->killed_for = reason;
    command->killing = true;
    command->kill_by = loop_now() + KILL_PATIENCE_SECONDS;
    command->tree_dead = false;
    kill_again(command);
}

void command_tell_end(const struct command *command, struct outlet *outlet, enum reason reason, int code,
                      const char *detail) {
    char payload[WIRE_EXITED_FIELDS + FAULT_BYTES] = {(char)reason};
    bool signaled = command != NULL && WIFSIGNALED(command->status);
    wire_put32(payload + 1, (uint32_t)code);
    wire_put32(payload + 5, signaled ? (uint32_t)WTERMSIG(command->status) : 0);
    wire_put_double(payload + 9, command != NULL ? command->wall : 0);
    wire_put_double(payload + 17, command != NULL ? command->cpu : 0);
    size_t size = strnlen(detail, FAULT_BYTES);
    memcpy(payload + WIRE_EXITED_FIELDS, detail, size);
    outlet->kind->ended(outlet, (struct iovec){payload, WIRE_EXITED_FIELDS + size});
}

static void tell_end(struct command *command) {
    const struct memory_files *memory = &command->table->memory;
    char detail[128] = "";
    int number = WIFSIGNALED(command->status) ? WTERMSIG(command->status) : 0;
    int code = WIFEXITED(command->status) ? WEXITSTATUS(command->status) : 0;
    enum reason reason = command->killed_for;
    if (command->survivors)
        strcpy(detail, "some of its processes did not die");
    if (reason == EXITED && number != 0)
        reason = SIGNALED;
    /* A shell reports its child's SIGKILL as 137. */
    bool by_other = command->killed_for == EXITED && (number == SIGKILL || code == 128 + SIGKILL);
    if (by_other && memory_kills(memory) > command->oom_before) {
        reason = OOM_KILLED;
        memory_describe(memory, detail, sizeof detail);
    }
    if (reason == EXITED && code != 0 && detail[0] == '\0')
        disk_describe(detail, sizeof detail);
    command_tell_end(command, command->outlet, reason, code, detail);
}

void command_finish_if_done(struct command *command) {
    if (command->over || !command->reaped || reads(command) || !command->tree_dead)
        return;
    command->over = true;
    loop_cancel(command->table->loop, &command->timer);
    command_close_stdin(command);
    /* Its owner may let go while it hears the end. */
    bool left_before = command->left;
    tell_end(command);
    buffer_free(&command->input);
    command->outlet->kind->hold_input(command->outlet, false);
    if (left_before)
        command_leave(command);
}
