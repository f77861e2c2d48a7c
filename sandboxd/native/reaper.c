/* Waits for children without looking at all of them each time. */
#include "reaper.h"

#include <sys/wait.h>
#include <time.h>

/* So long an end that no signal named may stay unknown, and so much less often all are looked at. */
enum { LOOK_MILLISECONDS = 200 };

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

void reaper_await(struct reaper *reaper, pid_t pid) {
    if (reaper->count < REAPER_AWAITED_MOST)
        reaper->awaited[reaper->count++] = pid;
}

static void forget(struct reaper *reaper, pid_t pid) {
    for (int n = reaper->count - 1; n >= 0; n--)
        if (reaper->awaited[n] == pid)
            reaper->awaited[n] = reaper->awaited[--reaper->count];
}

void reaper_signaled(struct reaper *reaper, pid_t pid) {
    reaper->told = pid;
    if (reaper->look_at == 0)
        reaper->look_at = now() + LOOK_MILLISECONDS;
}

int reaper_patience(const struct reaper *reaper) {
    if (reaper->look_at == 0)
        return -1;
    int64_t left = reaper->look_at - now();
    return left > 0 ? (int)left : 0;
}

/* One that the reaper knows of by its number. */
static pid_t next_known(struct reaper *reaper, int *status) {
    pid_t told = reaper->told;
    reaper->told = 0;
    if (told > 0 && waitpid(told, status, WNOHANG) == told)
        return told;
    for (int n = 0; n < reaper->count; n++)
        if (waitpid(reaper->awaited[n], status, WNOHANG) == reaper->awaited[n])
            return reaper->awaited[n];
    return 0;
}

pid_t reaper_next(struct reaper *reaper, int *status) {
    pid_t pid = next_known(reaper, status);
    if (reaper_patience(reaper) == 0) {
        reaper->look_at = 0;
        reaper->look = true;
    }
    if (pid <= 0 && reaper->look)
        pid = waitpid(-1, status, WNOHANG);
    if (pid <= 0) {
        reaper->look = false;
        return 0;
    }
    forget(reaper, pid);
    return pid;
}
