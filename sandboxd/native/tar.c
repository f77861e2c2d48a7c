/* Headers of tar archives, written and read. */
#include "tar.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Of a number in a pax record. */
    DIGITS = 20,
    NAME_BYTES = 100,
};
/* Where the fields of a header begin. */
enum { MODE = 100, OWNER = 108, GROUP = 116, SIZE = 124, MTIME = 136, SUM = 148, KIND = 156, TARGET = 157,
       MAGIC = 257, PREFIX = 345, PREFIX_BYTES = 155 };

static const char ZEROS[TAR_BLOCK];

size_t tar_padding(int64_t size) {
    return (size_t)(-size & (TAR_BLOCK - 1));
}

void tar_entry_free(struct tar_entry *entry) {
    free(entry->name);
    free(entry->target);
    *entry = (struct tar_entry){0};
}

void tar_overrides_free(struct tar_overrides *overrides) {
    free(overrides->path);
    free(overrides->target);
    *overrides = (struct tar_overrides){0};
}

/* -- writing */

void tar_add_zeros(struct buffer *to, size_t size) {
    for (; size > TAR_BLOCK; size -= TAR_BLOCK)
        buffer_add(to, ZEROS, TAR_BLOCK);
    buffer_add(to, ZEROS, size);
}

static unsigned sum_of(const char *block) {
    unsigned sum = 0;
    for (int n = 0; n < TAR_BLOCK; n++)
        sum += n >= SUM && n < KIND ? ' ' : (unsigned char)block[n];
    return sum;
}

static void add_block(struct buffer *to, const struct tar_entry *entry) {
    char block[TAR_BLOCK + 1] = {0};
    int64_t size = entry->size < TAR_OCTAL_LIMIT ? entry->size : 0;
    int64_t mtime = entry->mtime < 0 ? 0 : entry->mtime;
    if (mtime >= TAR_OCTAL_LIMIT)
        mtime = TAR_OCTAL_LIMIT - 1;
    memcpy(block, entry->name, strnlen(entry->name, NAME_BYTES));
    snprintf(block + MODE, 8, "%07o", entry->mode & 07777);
    snprintf(block + OWNER, 8, "%07o", 0);
    snprintf(block + GROUP, 8, "%07o", 0);
    snprintf(block + SIZE, 12, "%011llo", (unsigned long long)size);
    snprintf(block + MTIME, 12, "%011llo", (unsigned long long)mtime);
    block[KIND] = entry->kind;
    memcpy(block + TARGET, entry->target, strnlen(entry->target, NAME_BYTES));
    memcpy(block + MAGIC, "ustar\00000", 8);
    snprintf(block + SUM, 8, "%06o", sum_of(block));
    block[KIND - 1] = ' ';
    buffer_add(to, block, TAR_BLOCK);
}

/* `length key=value`, where the length counts its own digits. */
static void add_record(struct buffer *to, const char *key, const char *value) {
    size_t rest = strlen(key) + strlen(value) + 3;
    size_t length = rest + (size_t)snprintf(NULL, 0, "%zu", rest);
    length = rest + (size_t)snprintf(NULL, 0, "%zu", length);
    char begin[64];
    int size = snprintf(begin, sizeof begin, "%zu %s=", length, key);
    buffer_add(to, begin, (size_t)size);
    buffer_add(to, value, strlen(value));
    buffer_add(to, "\n", 1);
}

void tar_add_header(struct buffer *to, const struct tar_entry *entry) {
    struct buffer records = {0};
    if (strlen(entry->name) > NAME_BYTES)
        add_record(&records, "path", entry->name);
    if (strlen(entry->target) > NAME_BYTES)
        add_record(&records, "linkpath", entry->target);
    if (entry->size >= TAR_OCTAL_LIMIT) {
        char digits[DIGITS + 1];
        snprintf(digits, sizeof digits, "%lld", (long long)entry->size);
        add_record(&records, "size", digits);
    }
    if (buffer_size(&records) != 0) {
        char name[] = "./PaxHeader", target[] = "";
        struct tar_entry extension = {TAR_PAX, name, target, 0644, (int64_t)buffer_size(&records), 0};
        add_block(to, &extension);
        buffer_add(to, buffer_at(&records), buffer_size(&records));
        tar_add_zeros(to, tar_padding(extension.size));
    }
    buffer_free(&records);
    add_block(to, entry);
}

/* -- reading */

/* Octal digits, or GNU's form for large numbers: the first bit set, then big-endian. What does not fit is the
 * largest or the smallest that does. False: it is no number. */
static bool number(const char *field, size_t size, int64_t *value) {
    if ((field[0] & 0x80) != 0) {
        *value = (unsigned char)field[0] == 0x80 ? 0 : (signed char)field[0];
        int64_t most = *value < 0 ? INT64_MIN : INT64_MAX;
        for (size_t n = 1; n < size; n++)
            if (__builtin_mul_overflow(*value, 256, value) ||
                __builtin_add_overflow(*value, (unsigned char)field[n], value)) {
                *value = most;
                break;
            }
        return true;
    }
    while (size != 0 && (field[size - 1] == ' ' || field[size - 1] == 0))
        size--;
    while (size != 0 && (*field == ' ' || *field == 0))
        field++, size--;
    for (*value = 0; size != 0; field++, size--) {
        if (*field < '0' || *field > '7')
            return false;
        *value = *value * 8 + (*field - '0');
    }
    return true;
}

static char *text(const char *field, size_t size) {
    return memory_copy(field, strnlen(field, size));
}

static void set_name(struct tar_entry *entry, const char *block) {
    entry->name = text(block, NAME_BYTES);
    if (memcmp(block + MAGIC, "ustar", 6) != 0 || block[PREFIX] == 0)
        return;
    struct buffer name = {0};
    buffer_add(&name, block + PREFIX, strnlen(block + PREFIX, PREFIX_BYTES));
    buffer_add(&name, "/", 1);
    buffer_add(&name, entry->name, strlen(entry->name));
    free(entry->name);
    entry->name = memory_copy(buffer_at(&name), buffer_size(&name));
    buffer_free(&name);
}

bool tar_parse(struct tar_entry *entry, const char *block, const char **why) {
    int64_t sum, mode;
    *entry = (struct tar_entry){0};
    if (memcmp(block, ZEROS, TAR_BLOCK) == 0)
        return true;
    *why = "a header with a number that is none";
    if (!number(block + SUM, 8, &sum) || !number(block + MODE, 8, &mode) ||
        !number(block + SIZE, 12, &entry->size) || !number(block + MTIME, 12, &entry->mtime))
        return false;
    *why = "a header with a wrong sum";
    if (sum != sum_of(block))
        return false;
    *why = "a header with a negative size";
    if (entry->size < 0)
        return false;
    entry->mode = (uint32_t)mode;
    entry->kind = block[KIND];
    entry->target = text(block + TARGET, NAME_BYTES);
    set_name(entry, block);
    size_t length = strlen(entry->name);
    /* Other kinds of a regular file: before ustar, and "contiguous". */
    if (entry->kind == 0 || entry->kind == '7')
        entry->kind = length != 0 && entry->name[length - 1] == '/' ? TAR_DIRECTORY : TAR_REGULAR;
    return true;
}

/* What does not fit is the largest that does. False: it is no number. */
static bool decimal(const char *field, size_t size, int64_t *value) {
    if (size == 0 || size > DIGITS)
        return false;
    bool large = false;
    for (*value = 0; size != 0; field++, size--) {
        if (*field < '0' || *field > '9')
            return false;
        large = large || __builtin_mul_overflow(*value, 10, value) ||
                __builtin_add_overflow(*value, *field - '0', value);
    }
    if (large)
        *value = INT64_MAX;
    return true;
}

static void replace(char **string, size_t *length, const char *value, size_t size) {
    free(*string);
    *string = memory_copy(value, size);
    *length = size;
}

static bool is(const char *key, size_t size, const char *name) {
    return size == strlen(name) && memcmp(key, name, size) == 0;
}

/* Takes `key=value`. */
static bool take_record(struct tar_overrides *overrides, const char *record, size_t size) {
    static const char SPARSE[] = "GNU.sparse.";
    const char *equals = memchr(record, '=', size);
    size_t key = equals != NULL ? (size_t)(equals - record) : size;
    const char *value = equals != NULL ? equals + 1 : record + size;
    size_t rest = size - (size_t)(value - record);
    if (is(record, key, "path"))
        replace(&overrides->path, &overrides->path_length, value, rest);
    else if (is(record, key, "linkpath"))
        replace(&overrides->target, &overrides->target_length, value, rest);
    else if (is(record, key, "size"))
        return overrides->has_size = decimal(value, rest, &overrides->size);
    else if (key >= strlen(SPARSE) && memcmp(record, SPARSE, strlen(SPARSE)) == 0)
        overrides->sparse = true;
    return true;
}

static bool take_records(struct tar_overrides *overrides, const char *body, size_t size, const char **why) {
    for (size_t start = 0; start < size;) {
        size_t near = size - start < DIGITS + 1 ? size - start : DIGITS + 1;
        const char *space = memchr(body + start, ' ', near);
        int64_t length = 0;
        *why = "a record with a number that is none";
        if (space != NULL && !decimal(body + start, (size_t)(space - body) - start, &length))
            return false;
        *why = "a record with a wrong length";
        if (space == NULL || (uint64_t)length > size - start || space - body >= (ptrdiff_t)start + length)
            return false;
        const char *record = space + 1, *end = body + start + length - 1;
        *why = "a record with a number that is none";
        if (!take_record(overrides, record, record < end ? (size_t)(end - record) : 0))
            return false;
        start += (size_t)length;
    }
    return true;
}

bool tar_override(struct tar_overrides *overrides, char kind, const char *body, size_t size,
                  const char **why) {
    if (kind == TAR_PAX)
        return take_records(overrides, body, size, why);
    while (size != 0 && body[size - 1] == 0)
        size--;
    if (kind == TAR_GNU_NAME)
        replace(&overrides->path, &overrides->path_length, body, size);
    else if (kind == TAR_GNU_LINK)
        replace(&overrides->target, &overrides->target_length, body, size);
    return true;
}

bool tar_apply(struct tar_overrides *overrides, struct tar_entry *entry, const char **why) {
    bool zero = (overrides->path != NULL && strlen(overrides->path) != overrides->path_length) ||
                (overrides->target != NULL && strlen(overrides->target) != overrides->target_length);
    bool sparse = overrides->sparse;
    if (overrides->path != NULL) {
        free(entry->name);
        entry->name = overrides->path;
    }
    if (overrides->target != NULL) {
        free(entry->target);
        entry->target = overrides->target;
    }
    if (overrides->has_size)
        entry->size = overrides->size;
    *overrides = (struct tar_overrides){0};
    *why = sparse ? "a sparse file, whose parts would be taken for the whole" : "a name with a zero byte";
    return !sparse && !zero;
}
