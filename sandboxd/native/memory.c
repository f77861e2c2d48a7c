/* What the kernel tells of this sandbox's memory: kills at its limit, the limit, the most that was used. */
#include "memory.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Kills, peak and limit, by control groups of version 2 and of version 1. */
static const char *const FILES[2][3] = {
    {"memory.events", "memory.peak", "memory.max"},
    {"memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes"},
};

struct memory_files memory_files_of(int group) {
    for (int version = 0; version < 2; version++) {
        int found[3];
        for (int n = 0; n < 3; n++)
            found[n] = openat(group, FILES[version][n], O_RDONLY | O_CLOEXEC);
        if (found[0] >= 0)
            return (struct memory_files){found[0], found[1], found[2]};
        for (int n = 1; n < 3; n++)
            if (found[n] >= 0)
                close(found[n]);
    }
    return (struct memory_files){-1, -1, -1};
}

/* The file's text; empty when there is none. */
static void read_text(int fd, char *text, size_t size) {
    ssize_t count = fd >= 0 ? pread(fd, text, size - 1, 0) : 0;
    text[count > 0 ? count : 0] = 0;
}

uint64_t memory_kills(const struct memory_files *files) {
    char text[1024];
    read_text(files->kills, text, sizeof text);
    for (char *line = text; line != NULL && *line != 0; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "oom_kill ", 9) == 0)
            return strtoull(line + 9, NULL, 10);
    }
    return 0;
}

/* False unless the file holds a number and nothing else: there may be no limit. */
static bool read_number(int fd, char *text, size_t size) {
    read_text(fd, text, size);
    size_t digits = 0;
    while (isdigit((unsigned char)text[digits]))
        digits++;
    bool alone = digits != 0 && (text[digits] == 0 || text[digits] == '\n');
    text[digits] = 0;
    return alone;
}

void memory_describe(const struct memory_files *files, char *text, size_t size) {
    char limit[32], peak[32];
    bool has_limit = read_number(files->limit, limit, sizeof limit);
    bool has_peak = read_number(files->peak, peak, sizeof peak);
    if (has_limit && has_peak)
        snprintf(text, size, "memory limit %s bytes, peak %s bytes", limit, peak);
    else if (has_limit || has_peak)
        snprintf(text, size, "memory %s %s bytes", has_limit ? "limit" : "peak", has_limit ? limit : peak);
    else
        *text = 0;
}
