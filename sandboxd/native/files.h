/* The files of a sandbox, with its own rights and inside its own root. */
#ifndef SANDBOXD_FILES_H
#define SANDBOXD_FILES_H

#include "transfer.h"

#include <sys/stat.h>

/* The bytes of a regular file from `offset`; no more than `limit`, unless that is negative. */
struct giver *file_read(const char *path, uint64_t offset, int64_t limit);
/* What is at `path`, not followed if it is a link: one packed description. */
struct giver *file_describe(const char *path);
/* What a directory holds, sorted by name: packed descriptions, whole in each piece. */
struct giver *file_list(const char *path);
/* Removes a file, a link, or a directory, with all it holds if `recursive`. */
struct giver *file_remove(const char *path, bool recursive);
/* Fills a new file beside the target, and renames it over that when all has come. NULL with the fault. */
struct sink *file_write(const char *path, uint32_t mode, struct fault *fault);

/* Between the modules about files. Each of these returns false with the fault. */
bool write_all(int fd, const char *data, size_t size, struct fault *fault);
bool make_directories(const char *path, struct fault *fault);
/* The target of a link, for free(); NULL with the fault. */
char *read_link(const char *path, struct fault *fault);
bool is_directory(const char *path);
/* `directory`/`name`, for free(). */
char *join_path(const char *directory, const char *name);
/* Whether a name in an archive says a place outside of the directory that it is unpacked into. */
bool leads_out(const char *name);
/* A copy without the slashes at its end, which would have a symbolic link followed. */
char *without_slash(const char *path);

/* Names with what is known of them. Begins as {0}. */
struct names {
    struct name {
        char *text;
        bool directory;
    } *items;
    size_t count, room;
};

/* Takes the text over. */
void names_add(struct names *names, char *text, bool directory);
/* Every name in a directory, in no order. False with the fault. */
bool names_read(struct names *names, const char *path, struct fault *fault);
void names_sort(struct names *names);
void names_free(struct names *names);

#endif
