/* What a command may have failed for: its program says it in its own words, or not at all. */
#include "disk.h"

#include <stdio.h>
#include <sys/statvfs.h>

static const char *const PLACES[] = {"/", "/tmp", "/dev/shm"};

void disk_describe(char *text, size_t size) {
    text[0] = '\0';
    for (size_t n = 0; n < sizeof PLACES / sizeof PLACES[0]; n++) {
        struct statvfs found;
        if (statvfs(PLACES[n], &found) != 0 || found.f_blocks == 0)
            continue;
        const char *none = found.f_bavail == 0                         ? "space"
                           : found.f_files > 0 && found.f_favail == 0 ? "room for more files"
                                                                       : NULL;
        if (none != NULL) {
            unsigned long long bytes = (unsigned long long)found.f_blocks * found.f_frsize;
            snprintf(text, size, "DISK_FULL: no %s is left in %s, which holds %llu bytes", none, PLACES[n],
                     bytes);
            return;
        }
    }
}
