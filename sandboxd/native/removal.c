/* Removes a file or a directory with all it holds, in steps short enough for the loop. */
#include "files.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* So many files are removed in one step. */
enum { REMOVED_AT_ONCE = 128 };

struct remover {
    struct giver giver;
    char *path;           /* Until it has begun. */
    bool recursive;
    struct names stack;   /* Directories, each below the one before or beside it. */
    struct names entries; /* Of the last of them. */
    size_t next;          /* Of these, the first that was not looked at. */
    bool read;            /* They are the last one's. */
};

static void remover_close(struct giver *giver) {
    struct remover *remover = (struct remover *)giver;
    names_free(&remover->stack);
    names_free(&remover->entries);
    free(remover->path);
    free(remover);
}

/* What has gone meanwhile need not be removed. */
static bool removed(int result, struct fault *fault) {
    return result == 0 || errno == ENOENT || fault_os(fault, errno);
}

/* What the first step does; ends there unless a directory is to be emptied. */
static enum step begin(struct remover *remover, struct fault *fault) {
    struct stat status;
    char *path = remover->path;
    int result = lstat(path, &status);
    if (result == 0 && S_ISDIR(status.st_mode) && remover->recursive) {
        names_add(&remover->stack, path, true);
        remover->path = NULL;
        return STEP_PIECE;
    }
    if (result == 0)
        result = S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path);
    if (result == 0)
        return STEP_END;
    fault_os(fault, errno);
    return STEP_FAULT;
}

/* Removes some of the files; the directories stay. */
static bool remove_files(struct remover *remover, const char *directory, struct fault *fault) {
    for (int left = REMOVED_AT_ONCE; left != 0 && remover->next < remover->entries.count; remover->next++) {
        const struct name *entry = &remover->entries.items[remover->next];
        if (entry->directory)
            continue;
        left--;
        char *path = join_path(directory, entry->text);
        bool gone = removed(unlink(path), fault);
        free(path);
        if (!gone)
            return false;
    }
    return true;
}

/* The directory has no files left: goes down into what is in it, or removes it. */
static bool go_on(struct remover *remover, struct fault *fault) {
    struct names *stack = &remover->stack;
    size_t top = stack->count - 1;
    for (size_t n = 0; n < remover->entries.count; n++)
        if (remover->entries.items[n].directory)
            names_add(stack, join_path(stack->items[top].text, remover->entries.items[n].text), true);
    names_free(&remover->entries);
    remover->read = false;
    if (stack->count - 1 > top)
        return true;
    bool gone = removed(rmdir(stack->items[top].text), fault);
    free(stack->items[top].text);
    stack->count = top;
    return gone;
}

static enum step remover_next(struct giver *giver, struct buffer *piece, struct fault *fault) {
    struct remover *remover = (struct remover *)giver;
    (void)piece;
    if (remover->path != NULL)
        return begin(remover, fault);
    if (remover->stack.count == 0)
        return STEP_END;
    const char *directory = remover->stack.items[remover->stack.count - 1].text;
    if (!remover->read) {
        if (!names_read(&remover->entries, directory, fault) && fault->number != ENOENT)
            return STEP_FAULT;
        remover->read = true;
        remover->next = 0;
    }
    if (!remove_files(remover, directory, fault))
        return STEP_FAULT;
    if (remover->next == remover->entries.count && !go_on(remover, fault))
        return STEP_FAULT;
    return STEP_PIECE;
}

struct giver *file_remove(const char *path, bool recursive) {
    static const struct giver_kind REMOVER = {remover_next, remover_close};
    struct remover *remover = memory_get(sizeof *remover);
    *remover = (struct remover){.giver = {&REMOVER}, .path = without_slash(path), .recursive = recursive};
    return &remover->giver;
}
