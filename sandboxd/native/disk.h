/* Whether a place that commands write to is full. */
#ifndef SANDBOXD_DISK_H
#define SANDBOXD_DISK_H

#include <stddef.h>

/* In words which one is, the first of them; empty when none is. */
void disk_describe(char *text, size_t size);

#endif
