/* What the kernel tells of this sandbox's memory: kills at its limit, the limit, the most that was used. */
#ifndef SANDBOXD_MEMORY_H
#define SANDBOXD_MEMORY_H

#include "guest.h"

#include <stddef.h>
#include <stdint.h>

/* The files of the control group whose directory is open as `group`, by version 2 or 1. */
struct memory_files memory_files_of(int group);
/* How often the kernel killed for the limit, as far as the host lets see. */
uint64_t memory_kills(const struct memory_files *files);
/* Limit and peak in words; empty when neither is known. */
void memory_describe(const struct memory_files *files, char *text, size_t size);

#endif
