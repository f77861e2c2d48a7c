/* Frames between the daemon and a guest: numbers, and how the request for a command unpacks. */
#include "wire.h"

#include "buffer.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

static const char DEFAULT_PATH[] = "/usr/local/bin:/usr/bin:/bin";

uint16_t wire_get16(const char *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return be16toh(value);
}

uint32_t wire_get32(const char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return be32toh(value);
}

uint64_t wire_get64(const char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return be64toh(value);
}

void wire_put16(char *at, uint16_t value) {
    value = htobe16(value);
    memcpy(at, &value, sizeof value);
}

void wire_put32(char *at, uint32_t value) {
    value = htobe32(value);
    memcpy(at, &value, sizeof value);
}

void wire_put64(char *at, uint64_t value) {
    value = htobe64(value);
    memcpy(at, &value, sizeof value);
}

void wire_put_double(char *at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    wire_put64(at, bits);
}

/* True when exactly `count` strings without NULs fill the payload. */
static bool strings_fill(const char *at, const char *end, uint64_t count) {
    for (; count != 0; count--) {
        if (end - at < 4)
            return false;
        size_t length = wire_get32(at);
        at += 4;
        if ((size_t)(end - at) < length || memchr(at, 0, length) != NULL)
            return false;
        at += length;
    }
    return at == end;
}

/* The next string. The first byte of its length ends the one before it. */
static char *next_string(char **at, size_t *length) {
    *length = wire_get32(*at);
    **at = 0;
    char *string = *at + 4;
    *at = string + *length;
    return string;
}

struct variable {
    char *text;
    size_t name; /* The length of the name. */
    size_t index;
};

static int compare_names(const struct variable *a, const struct variable *b) {
    int order = memcmp(a->text, b->text, a->name < b->name ? a->name : b->name);
    return order != 0 ? order : (a->name > b->name) - (a->name < b->name);
}

static int by_name(const void *left, const void *right) {
    const struct variable *a = left, *b = right;
    int order = compare_names(a, b);
    return order != 0 ? order : (a->index > b->index) - (a->index < b->index);
}

/* A name that comes twice keeps its first place and its last value. */
static void keep_last(char **env, struct variable *variables, size_t count) {
    qsort(variables, count, sizeof *variables, by_name);
    for (size_t first = 0, next; first < count; first = next) {
        next = first + 1;
        for (; next < count && compare_names(&variables[first], &variables[next]) == 0; next++)
            env[variables[next].index] = NULL;
        env[variables[first].index] = variables[next - 1].text;
    }
    size_t kept = 0;
    for (size_t n = 0; n < count; n++)
        if (env[n] != NULL)
            env[kept++] = env[n];
    env[kept] = NULL;
}

/* False when a name is none. */
static bool read_env(struct exec_request *request, char **at, size_t count) {
    struct variable *variables = memory_get((count + 1) * sizeof *variables);
    bool right = true;
    for (size_t n = 0; n < count && right; n++) {
        size_t name_length, value_length;
        char *name = next_string(at, &name_length);
        next_string(at, &value_length);
        right = name_length != 0 && memchr(name + 1, '=', name_length - 1) == NULL;
        /* The length of the value lies between them: three of its bytes move before the name. */
        memmove(name + 3, name, name_length);
        name[3 + name_length] = '=';
        variables[n] = (struct variable){name + 3, name_length, n};
        request->env[n] = name + 3;
    }
    if (right)
        keep_last(request->env, variables, count);
    free(variables);
    return right;
}

bool exec_request_read(struct exec_request *request, const char *payload, size_t size) {
    *request = (struct exec_request){.path = DEFAULT_PATH};
    if (size < WIRE_EXEC_FIELDS)
        return false;
    uint64_t timeout = wire_get64(payload);
    memcpy(&request->timeout, &timeout, sizeof timeout);
    request->output_limit = (int64_t)wire_get64(payload + 8);
    request->output_tail = wire_get32(payload + 16);
    request->has_stdin = payload[20] & WIRE_HAS_STDIN;
    uint64_t users = payload[20] & WIRE_HAS_USER ? 1 : 0;
    request->rows = wire_get16(payload + 21);
    request->columns = wire_get16(payload + 23);
    uint64_t argc = wire_get32(payload + 25), envc = wire_get32(payload + 29);
    payload += WIRE_EXEC_FIELDS, size -= WIRE_EXEC_FIELDS;
    if (argc == 0 || !strings_fill(payload, payload + size, 1 + users + argc + 2 * envc))
        return false;
    request->bytes = memory_copy(payload, size);
    request->argv = memory_get((argc + 1) * sizeof *request->argv);
    request->env = memory_get((envc + 2) * sizeof *request->env);
    char *at = request->bytes;
    size_t length;
    request->cwd = next_string(&at, &length);
    if (users != 0)
        request->user = next_string(&at, &length);
    for (size_t n = 0; n < argc; n++)
        request->argv[n] = next_string(&at, &length);
    bool right = read_env(request, &at, envc);
    *at = 0;
    for (char **variable = request->env; right && *variable != NULL; variable++)
        if (strncmp(*variable, "PATH=", 5) == 0)
            request->path = *variable + 5;
    if (!right)
        exec_request_free(request);
    return right;
}

void exec_request_free(struct exec_request *request) {
    free(request->argv);
    free(request->env);
    free(request->bytes);
    *request = (struct exec_request){0};
}
