/* One program for what is native: which part of it runs, the first argument says. */
#include "container.h"
#include "guest.h"
#include "starter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char USAGE[] =
    "usage: sandboxd-guest serve FD [LIFELINE] | container SOCKET READY [FILTER] | starter ...\n";

/* -1: it is no descriptor's number. */
static int descriptor(const char *number) {
    char *end;
    long fd = strtol(number, &end, 10);
    if (*number != 0 && *end == 0 && fd >= 0 && fd < 1 << 20)
        return (int)fd;
    fprintf(stderr, "sandboxd-guest: %s is no descriptor\n", number);
    return -1;
}

/* A plain process on a socket that it inherits, until its lifeline ends: what the tests talk to. */
static int serve(int argc, char **argv) {
    const struct memory_files none = {-1, -1, -1};
    int listener = descriptor(argv[0]);
    int lifeline = argc > 1 ? descriptor(argv[1]) : -1;
    if (listener < 0 || (argc > 1 && lifeline < 0))
        return 2;
    return guest_serve(listener, none, lifeline, -1);
}

/* What whoever started this program ignores would be handed down to every command, past any exec. By the
 * plain system call: the C library refuses to speak of the two signals that it keeps for itself. */
static void forget_ignored(void) {
    const unsigned long nothing[4] = {0};
    for (long number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, nothing, NULL, sizeof(unsigned long));
}

int main(int argc, char **argv) {
    forget_ignored();
    const char *part = argc > 1 ? argv[1] : "";
    if (strcmp(part, "serve") == 0 && (argc == 3 || argc == 4))
        return serve(argc - 2, argv + 2);
    if (strcmp(part, "container") == 0 && (argc == 4 || argc == 5))
        return container_main(argv[2], argv[3], argv[4]);
    if (strcmp(part, "starter") == 0)
        return starter_main(argc, argv);
    fputs(USAGE, stderr);
    return 2;
}
