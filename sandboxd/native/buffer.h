/* Memory: what is asked for is there or the process ends; bytes that wait, taken from the front. */
#ifndef SANDBOXD_BUFFER_H
#define SANDBOXD_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

/* Zeroed memory. A sandbox without any left ends: nothing here could go on without it. */
void *memory_get(size_t size);
void *memory_resize(void *memory, size_t size);
/* A copy with a NUL behind it. */
char *memory_copy(const char *data, size_t size);
/* Ends the process with a line on standard error. */
_Noreturn void memory_gone(const char *what);

/* Begins as {0}. Frees its memory when the last byte of much was taken. */
struct buffer {
    char *data;
    size_t begin, end, capacity;
};

static inline size_t buffer_size(const struct buffer *buffer) {
    return buffer->end - buffer->begin;
}

/* The first byte; never NULL. */
char *buffer_at(const struct buffer *buffer);
/* Room for `size` more bytes behind the last one; `buffer_grew` says how many were filled. */
char *buffer_room(struct buffer *buffer, size_t size);
void buffer_grew(struct buffer *buffer, size_t size);
void buffer_add(struct buffer *buffer, const void *data, size_t size);
/* Takes `size` bytes off the front. */
void buffer_take(struct buffer *buffer, size_t size);
void buffer_free(struct buffer *buffer);

#endif
