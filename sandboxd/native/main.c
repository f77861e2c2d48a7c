/* One program for what is native: which part of it runs, the first argument says. */
#include "container.h"
#include "guest.h"
#include "starter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char USAGE[] = "usage: sandboxd-guest serve FD | container SOCKET READY | starter ...\n";

/* A plain process on a socket that it inherits: what the tests talk to. */
static int serve(const char *number) {
    char *end;
    long fd = strtol(number, &end, 10);
    if (*number == 0 || *end != 0 || fd < 0 || fd > 1 << 20) {
        fprintf(stderr, "sandboxd-guest: %s is no descriptor\n", number);
        return 2;
    }
    struct memory_files none = {-1, -1, -1};
    return guest_serve((int)fd, none, -1, -1);
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    if (strcmp(part, "serve") == 0 && argc == 3)
        return serve(argv[2]);
    if (strcmp(part, "container") == 0 && argc == 4)
        return container_main(argv[2], argv[3]);
    if (strcmp(part, "starter") == 0)
        return starter_main(argc - 1, argv + 1);
    fputs(USAGE, stderr);
    return 2;
}
