/* What is told of a command's output: all of it, what fits a limit, or its head and its tail. */
#include "output.h"

static void keep_tail(struct buffer *tail, size_t limit, const char *data, size_t size) {
    if (size > limit) {
        data += size - limit;
        size = limit;
    }
    if (buffer_size(tail) + size > limit)
        buffer_take(tail, buffer_size(tail) + size - limit);
    buffer_add(tail, data, size);
}

struct trimmed trim(struct trimmer *trimmer, struct budget *budget, const char *data, size_t size) {
    struct trimmed result = {trimmer->offset, size, false};
    trimmer->offset += size;
    if (budget->left < 0)
        return result;
    if ((uint64_t)budget->left < size)
        result.kept = (size_t)budget->left;
    budget->left -= (int64_t)result.kept;
    if (budget->tail == 0)
        result.too_much = result.kept < size;
    else
        keep_tail(&trimmer->tail, budget->tail, data + result.kept, size - result.kept);
    return result;
}

uint64_t trim_tail_offset(const struct trimmer *trimmer) {
    return trimmer->offset - buffer_size(&trimmer->tail);
}
