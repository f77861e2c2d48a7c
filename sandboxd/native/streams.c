/* What goes into a command and what comes out of it. */
#include "command.h"

#include "wire.h"

#include <errno.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum {
    /* Standard input that waits for its command; past it the daemon waits. */
    STDIN_AHEAD = 256 << 10,
    /* More than this waits for no command: a daemon that was told to wait sends no more. */
    STDIN_MOST = 2 * WIRE_MAX_REQUEST,
};

/* -- input */

static void writable(void *context, uint32_t mask) {
    (void)mask;
    command_feed(context);
}

void command_close_stdin(struct command *command) {
    if (command->stdin_fd < 0)
        return;
    loop_unwatch(command->table->loop, command->stdin_fd);
    close(command->stdin_fd);
    command->stdin_fd = -1;
}

/* Writes what the command takes; an input that nobody reads is thrown away. */
void command_feed(struct command *command) {
    struct buffer *input = &command->input;
    struct loop *loop = command->table->loop;
    if (command->stdin_fd >= 0 && buffer_size(input) != 0) {
        ssize_t written = write(command->stdin_fd, buffer_at(input), buffer_size(input));
        if (written >= 0)
            buffer_take(input, (size_t)written);
        else if (errno != EAGAIN && errno != EINTR)
            command_close_stdin(command);
    }
    if (command->stdin_fd < 0)
        buffer_free(input);
    else if (buffer_size(input) != 0)
        loop_watch(loop, command->stdin_fd, LOOP_OUT, writable, command);
    else if (command->input_ended)
        command_close_stdin(command);
    else
        loop_watch(loop, command->stdin_fd, LOOP_PARKED, writable, command);
    command->outlet->kind->hold_input(command->outlet, buffer_size(input) >= STDIN_AHEAD);
}

/* To the group in the terminal's foreground, or the command's own; none once it was reaped. */
static bool send_signal(const struct command *command, uint32_t number) {
    if (command->reaped)
        return true;
    if (number >= (uint32_t)NSIG)
        return false;
    pid_t foreground = command->terminal >= 0 ? tcgetpgrp(command->terminal) : 0;
    /* 0 would be this process's own group. */
    if (kill(foreground > 0 ? -foreground : -command->pid, (int)number) == 0)
        return true;
    return errno == ESRCH || errno == EPERM;
}

static bool take_input(struct command *command, const char *payload, size_t size) {
    static const char end_of_file = 4;
    if (buffer_size(&command->input) + size > STDIN_MOST)
        return false;
    if (size == 0 && !command->input_ended && command->terminal >= 0)
        buffer_add(&command->input, &end_of_file, 1);
    command->input_ended = command->input_ended || size == 0;
    buffer_add(&command->input, payload, size);
    command_feed(command);
    return true;
}

bool command_received(struct command *command, char kind, const char *payload, size_t size) {
    if (kind == WIRE_STDIN)
        return take_input(command, payload, size);
    if (kind == WIRE_SIGNAL && size == 4)
        return send_signal(command, wire_get32(payload));
    if (kind != WIRE_RESIZE || size != 4)
        return false;
    if (command->terminal >= 0)
        terminal_resize(command->terminal, wire_get16(payload), wire_get16(payload + 2));
    return true;
}

/* -- output */

static void readable(void *context, uint32_t mask) {
    (void)mask;
    command_read(context);
}

void command_watch_streams(struct command *command) {
    bool congested = command->outlet->kind->congested(command->outlet);
    for (int n = 0; n < 2; n++) {
        struct stream *stream = &command->streams[n];
        if (stream->fd < 0)
            continue;
        /* A mask of 0 would still report hang-ups, in a tight loop. */
        loop_watch(command->table->loop, stream->fd, congested ? LOOP_PARKED : LOOP_IN, readable, stream);
    }
}

bool command_take_places(struct command *command) {
    struct loop *loop = command->table->loop;
    for (int n = 0; n < 2; n++)
        if (command->streams[n].fd >= 0 &&
            !loop_watch(loop, command->streams[n].fd, LOOP_PARKED, readable, &command->streams[n]))
            return false;
    return command->stdin_fd < 0 || loop_watch(loop, command->stdin_fd, LOOP_PARKED, writable, command);
}

void command_give_places(struct command *command) {
    for (int n = 0; n < 2; n++)
        loop_unwatch(command->table->loop, command->streams[n].fd);
    loop_unwatch(command->table->loop, command->stdin_fd);
}

static void tell(const struct stream *stream, uint64_t offset, const char *data, size_t size) {
    struct outlet *outlet = stream->command->outlet;
    if (size != 0)
        outlet->kind->output(outlet, stream->kind, offset, (struct iovec){(char *)data, size});
}

static void emit(struct stream *stream, const char *data, size_t size) {
    struct trimmed trimmed = trim(&stream->trimmer, &stream->command->budget, data, size);
    tell(stream, trimmed.offset, data, trimmed.kept);
    if (!trimmed.too_much)
        return;
    /* The kill before the close, or the command would die of SIGPIPE first. */
    command_kill(stream->command, OUTPUT_LIMIT_EXCEEDED);
    command_discard_output(stream->command);
}

/* What was kept of the output past the limit, now that no more comes. */
void command_send_tail(struct stream *stream) {
    struct buffer *tail = &stream->trimmer.tail;
    uint64_t offset = trim_tail_offset(&stream->trimmer);
    while (buffer_size(tail) != 0) {
        size_t size = buffer_size(tail) < WIRE_PIECE ? buffer_size(tail) : WIRE_PIECE;
        tell(stream, offset, buffer_at(tail), size);
        buffer_take(tail, size);
        offset += size;
    }
}

void command_close_stream(struct stream *stream) {
    if (stream->fd < 0)
        return;
    loop_unwatch(stream->command->table->loop, stream->fd);
    close(stream->fd);
    if (stream->fd == stream->command->terminal)
        stream->command->terminal = -1;
    stream->fd = -1;
}

void command_discard_output(struct command *command) {
    for (int n = 0; n < 2; n++)
        command_close_stream(&command->streams[n]);
}

void command_read(struct stream *stream) {
    static char piece[WIRE_PIECE];
    struct command *command = stream->command;
    if (stream->fd < 0 || command->outlet->kind->congested(command->outlet))
        return;
    size_t size = sizeof piece;
    if (stream->last_bytes >= 0 && (size_t)stream->last_bytes < size)
        size = (size_t)stream->last_bytes;
    ssize_t count = size != 0 ? read(stream->fd, piece, size) : 0;
    /* What was counted for the last bytes may have been read by another since: then there are none. */
    if (count < 0 && (errno == EINTR || (errno == EAGAIN && stream->last_bytes < 0)))
        return;
    if (count < 0) /* Or a terminal that nobody has open any more. */
        count = 0;
    if (stream->last_bytes >= 0)
        stream->last_bytes -= count;
    if (count != 0)
        emit(stream, piece, (size_t)count);
    if (count == 0 || stream->last_bytes == 0) {
        command_send_tail(stream);
        command_close_stream(stream);
    }
    if (command->outlet->kind->congested(command->outlet))
        command_watch_streams(command);
    command_finish_if_done(command);
}

/* Another who has the pipe open may read it empty, and no event would come then: nothing is waited for. */
void command_read_rest(struct stream *stream) {
    struct outlet **outlet = &stream->command->outlet;
    while (stream->fd >= 0 && stream->last_bytes >= 0 && !(*outlet)->kind->congested(*outlet))
        command_read(stream);
}
