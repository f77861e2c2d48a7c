/* The guest's event loop: descriptors by epoll, timers by a heap, one thread. */
#ifndef SANDBOXD_LOOP_H
#define SANDBOXD_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

enum { LOOP_IN = EPOLLIN, LOOP_OUT = EPOLLOUT, LOOP_GONE = EPOLLHUP | EPOLLERR };
/* Waits for nothing and keeps its place; a hang-up is reported once at most. The kernel counts places for
 * each of its users, which many sandboxes are together: one that was given up may not be had again. */
enum { LOOP_PARKED = EPOLLONESHOT };

typedef void watch_call(void *context, uint32_t ready);
typedef void timer_call(void *context);

/* A call to come; part of what waits for it. Begins as {0}. */
struct timer {
    int64_t due; /* In nanoseconds of the monotonic clock. */
    uint64_t order;
    timer_call *call;
    void *context;
    size_t place; /* In the heap, from 1; 0: it is not set. */
};

struct watch {
    watch_call *call; /* NULL: the descriptor is not watched. */
    void *context;
    uint32_t mask, generation;
};

struct grave {
    void *object;
    void (*free)(void *object);
};

struct loop {
    int epoll;
    bool stopped;
    struct watch *watches; /* By descriptor. */
    size_t watch_room;
    struct timer **timers;
    size_t timer_count, timer_room;
    uint64_t order;
    struct grave *graves;
    size_t grave_count, grave_room;
};

/* Seconds of the monotonic clock. */
double loop_now(void);

/* False when the system refuses. */
bool loop_open(struct loop *loop);
/* Calls whenever `fd` is ready for `mask`; replaces an earlier watch of it. Hang-ups are always reported.
 * False, with errno, where the kernel has no place for one more; a watch that is there can be changed. */
bool loop_watch(struct loop *loop, int fd, uint32_t mask, watch_call *call, void *context);
/* Idempotent; must come before the descriptor is closed. */
void loop_unwatch(struct loop *loop, int fd);
/* Sets the timer anew. */
void loop_after(struct loop *loop, struct timer *timer, double seconds, timer_call *call, void *context);
void loop_cancel(struct loop *loop, struct timer *timer);
/* Frees an object when no call that may still use it is under way. */
void loop_bury(struct loop *loop, void *object, void (*free)(void *object));
void loop_stop(struct loop *loop);
/* Returns after `loop_stop`. */
void loop_run(struct loop *loop);

#endif
