/* Memory: what is asked for is there or the process ends; bytes that wait, taken from the front. */
#include "buffer.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An empty buffer keeps no more than this for the next bytes. */
enum { KEPT_BYTES = 4096, FIRST_BYTES = 256 };

_Noreturn void memory_gone(const char *what) {
    static const char begin[] = "sandboxd-guest: no more ";
    if (write(2, begin, sizeof begin - 1) < 0 || write(2, what, strlen(what)) < 0 || write(2, "\n", 1) < 0)
        _exit(1);
    _exit(1);
}

void *memory_get(size_t size) {
    void *memory = calloc(1, size != 0 ? size : 1);
    if (memory == NULL)
        memory_gone("memory");
    return memory;
}

void *memory_resize(void *memory, size_t size) {
    memory = realloc(memory, size != 0 ? size : 1);
    if (memory == NULL)
        memory_gone("memory");
    return memory;
}

char *memory_copy(const char *data, size_t size) {
    char *copy = memory_resize(NULL, size + 1);
    if (size != 0)
        memcpy(copy, data, size);
    copy[size] = 0;
    return copy;
}

char *buffer_at(const struct buffer *buffer) {
    static char nothing[1];
    return buffer->data != NULL ? buffer->data + buffer->begin : nothing;
}

char *buffer_room(struct buffer *buffer, size_t size) {
    size_t held = buffer_size(buffer);
    if (buffer->capacity - buffer->end < size) {
        /* Moved only when half of it is free, so that a byte is moved once on average. */
        if (buffer->begin >= held && buffer->capacity - held >= size) {
            memmove(buffer->data, buffer->data + buffer->begin, held);
        } else {
            size_t capacity = buffer->capacity != 0 ? 2 * buffer->capacity : FIRST_BYTES;
            if (capacity < held + size)
                capacity = held + size;
            char *data = memory_resize(NULL, capacity);
            if (held != 0)
                memcpy(data, buffer->data + buffer->begin, held);
            free(buffer->data);
            buffer->data = data;
            buffer->capacity = capacity;
        }
        buffer->begin = 0;
        buffer->end = held;
    }
    return buffer->data != NULL ? buffer->data + buffer->end : buffer_at(buffer);
}

void buffer_grew(struct buffer *buffer, size_t size) {
    buffer->end += size;
}

void buffer_add(struct buffer *buffer, const void *data, size_t size) {
    if (size == 0)
        return;
    memcpy(buffer_room(buffer, size), data, size);
    buffer_grew(buffer, size);
}

void buffer_take(struct buffer *buffer, size_t size) {
    buffer->begin += size;
    if (buffer->begin != buffer->end)
        return;
    buffer->begin = buffer->end = 0;
    if (buffer->capacity > KEPT_BYTES)
        buffer_free(buffer);
}

void buffer_free(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){0};
}
