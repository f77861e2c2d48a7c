/* Waits for children without looking at all of them each time: a starter has a thousand, and to wait for any
 * one the kernel goes through all. */
#ifndef SANDBOXD_REAPER_H
#define SANDBOXD_REAPER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { REAPER_AWAITED_MOST = 64 };

/* All zero at the start. */
struct reaper {
    pid_t awaited[REAPER_AWAITED_MOST]; /* Were killed; with more these are found as those that end alone. */
    int count;
    pid_t told;      /* Of which a signal told; 0: of none. */
    int64_t look_at; /* When all are looked at, milliseconds by the monotonic clock; 0: there is no need. */
    bool look;
};

/* This child was killed. */
void reaper_await(struct reaper *reaper, pid_t pid);
/* SIGCHLD came and named this one. For others that ended meanwhile there may be no signal of their own. */
void reaper_signaled(struct reaper *reaper, pid_t pid);
/* For how many milliseconds to wait for a signal, -1: for ever. */
int reaper_patience(const struct reaper *reaper);
/* The next child that has ended, with its status; 0: none that is known of yet. To be asked until then, after
 * a signal and once the patience is over. */
pid_t reaper_next(struct reaper *reaper, int *status);

#endif
