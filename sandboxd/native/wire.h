/* Frames between the daemon and a guest: the guest's side of sandboxd/guest/wire.py, which describes them. */
#ifndef SANDBOXD_WIRE_H
#define SANDBOXD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    /* What the daemon sends. */
    WIRE_EXEC = 'E', WIRE_STDIN = 'I', WIRE_WRITE = 'W', WIRE_READ = 'R', WIRE_PING = 'P', WIRE_WATCH = 'V',
    WIRE_SIGNAL = 'K', WIRE_RESIZE = 'G', WIRE_STAT = 'T', WIRE_LIST = 'L', WIRE_REMOVE = 'M',
    WIRE_PACK = 'A', WIRE_UNPACK = 'U',
    /* Of named commands. */
    WIRE_START = 'B', WIRE_ATTACH = 'H', WIRE_SEND_SIGNAL = 'Q', WIRE_COMMANDS = 'C', WIRE_FORGET = 'F',
    /* What both send: a piece of a file; an empty one ends it. */
    WIRE_DATA = 'D',
    /* What the guest sends. */
    WIRE_STARTED = 'S', WIRE_STDOUT = '1', WIRE_STDERR = '2', WIRE_EXITED = 'Z', WIRE_DONE = 'O',
    WIRE_ERROR = 'X',
};

enum {
    WIRE_HEADER = 5,
    /* The largest payload that the daemon may send. */
    WIRE_MAX_REQUEST = 4 << 20,
    /* A piece of output or of a file. */
    WIRE_PIECE = 64 << 10,
};

/* The bonds of a named command to the connection that starts it: it ends with it, or not. */
enum { WIRE_HELD, WIRE_DETACHED, WIRE_RESUMABLE };

/* The flags of a command: what it has. */
enum { WIRE_HAS_STDIN = 1, WIRE_HAS_USER = 2 };

/* What is at a path. */
enum { WIRE_REGULAR = 1, WIRE_DIRECTORY, WIRE_SYMLINK, WIRE_OTHER };

/* The reasons of an EXITED frame. */
enum reason { EXITED, SIGNALED, TIMED_OUT, OOM_KILLED, OUTPUT_LIMIT_EXCEEDED, NOT_STARTED };

/* Sizes of the fixed parts of payloads. */
enum {
    WIRE_EXEC_FIELDS = 33, WIRE_EXITED_FIELDS = 25, WIRE_INFO_FIELDS = 27, WIRE_NAMED_FIELDS = 6,
    WIRE_NAMED_INFO_FIELDS = 34, WIRE_ATTACH_FIELDS = 16, WIRE_READ_FIELDS = 16,
};

/* Numbers as they travel: the most significant byte first. */
uint16_t wire_get16(const char *at);
uint32_t wire_get32(const char *at);
uint64_t wire_get64(const char *at);
void wire_put16(char *at, uint16_t value);
void wire_put32(char *at, uint32_t value);
void wire_put64(char *at, uint64_t value);
void wire_put_double(char *at, double value);

/* One command; everything is said, nothing is inherited. */
struct exec_request {
    double timeout;       /* In seconds; negative or no number: none. */
    int64_t output_limit; /* In bytes; negative: none. */
    uint32_t output_tail; /* Of each stream, instead of the end of the command at the limit. */
    bool has_stdin;
    const char *user; /* NULL: the guest's own. */
    uint16_t rows, columns; /* No rows are no terminal. */
    char *cwd;
    /* Each ends with NULL. The latter holds NAME=VALUE, each name once, and has room for one more. */
    char **argv, **env;
    const char *path;   /* Where programs are looked for. */
    char *bytes;        /* Holds the strings. */
};

/* False when it is malformed, or holds what no kernel takes; nothing is held then. */
bool exec_request_read(struct exec_request *request, const char *payload, size_t size);
void exec_request_free(struct exec_request *request);

#endif
