/* One command: its process, its two streams and its end, told to an outlet in the order they happened. */
#ifndef SANDBOXD_COMMAND_H
#define SANDBOXD_COMMAND_H

#include "guest.h"
#include "loop.h"
#include "outlet.h"
#include "output.h"
#include "spawn.h"

enum { COMMAND_BUCKETS = 64 };

/* The commands that run, by the pid of their first process. */
struct commands {
    struct loop *loop;
    struct spawner spawner;
    struct memory_files memory;
    struct command *buckets[COMMAND_BUCKETS];
};

/* One of a command's two outputs, as far as it was read. */
struct stream {
    struct command *command;
    struct trimmer trimmer;
    /* After the grace: how much more is read of what a background child keeps open; before it -1. */
    int64_t last_bytes;
    int fd;             /* -1: nothing more comes. */
    char kind;
};

/* A command that was started. It belongs to who started it until `command_leave`. */
struct command {
    struct commands *table;
    struct command *next; /* In its bucket. */
    struct outlet *outlet;
    struct stream streams[2];
    struct budget budget;
    struct buffer input;
    struct timer timer;
    uint64_t tag, oom_before;
    double began, wall, cpu, kill_by;
    pid_t pid;
    int status, stdin_fd, terminal;
    enum reason killed_for; /* EXITED: it was not killed. */
    bool input_ended, reaped, killing, tree_dead, survivors, over, left;
};

/* False when the system refuses. */
bool commands_open(struct commands *table, struct loop *loop, struct memory_files memory, int oom_score_fd);
/* Starts a command, or tells `outlet` why it was not and returns NULL. */
struct command *command_start(struct commands *table, const struct exec_request *request,
                              struct outlet *outlet);
/* Takes every ended child: commands, and the orphans that became PID 1's. */
void commands_reap(struct commands *table);

/* A frame for it. False when it breaks the protocol. */
bool command_received(struct command *command, char kind, const char *payload, size_t size);
/* The outlet takes output again. */
void command_drained(struct command *command);
/* Nobody wants it any more: the command and all that it started must end. */
void command_abandon(struct command *command);
/* Who started it lets go: from now on its outlet hears nothing, and it is freed at its end. */
void command_leave(struct command *command);

/* Between its parts. */
/* Has the loop keep a place for each of its ends. False, with errno, where there is none. */
bool command_take_places(struct command *command);
void command_give_places(struct command *command);
void command_watch_streams(struct command *command);
void command_read(struct stream *stream);
/* Past the grace: what the outlet takes now of what was there then. */
void command_read_rest(struct stream *stream);
void command_send_tail(struct stream *stream);
void command_close_stream(struct stream *stream);
void command_discard_output(struct command *command);
void command_feed(struct command *command);
void command_close_stdin(struct command *command);
void command_kill(struct command *command, enum reason reason);
void command_ended(struct command *command, int status, double cpu);
void command_finish_if_done(struct command *command);
/* Tells `outlet` the end. */
void command_tell_end(const struct command *command, struct outlet *outlet, enum reason reason, int code,
                      const char *detail);

#endif
