/* What the rest of the program asks of the guest: to serve a socket as a sandbox's first process. */
#ifndef SANDBOXD_GUEST_H
#define SANDBOXD_GUEST_H

/* Descriptors of what the kernel tells of the sandbox's memory: how often it killed for the limit, the most
 * that was used, the limit. -1: not there. */
struct memory_files {
    int kills, peak, limit;
};

/* Whether anybody may read or trace this process. */
#ifdef __SANITIZE_ADDRESS__
enum { GUEST_DUMPABLE = 1 }; /* The search for leaks at its end is a tracer. */
#else
enum { GUEST_DUMPABLE = 0 };
#endif

/* Serves `listener` until `lifeline` (-1: none) ends or SIGTERM asks to. Returns the exit code.
 * `oom_score_fd` is an open /proc/self/oom_score_adj that started commands write to, -1: none. */
int guest_serve(int listener, struct memory_files memory, int lifeline, int oom_score_fd);

#endif
