/* The guest's event loop: descriptors by epoll, timers by a heap, one thread. */
#include "loop.h"

#include "buffer.h"

#include <errno.h>
#include <limits.h>
#include <time.h>

enum { EVENTS_AT_ONCE = 64 };
static const double NANOSECONDS = 1e9;
/* A timer further away never comes. */
static const double LONGEST_SECONDS = 4e9;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

double loop_now(void) {
    return (double)now() / NANOSECONDS;
}

bool loop_open(struct loop *loop) {
    *loop = (struct loop){.epoll = epoll_create1(EPOLL_CLOEXEC)};
    return loop->epoll >= 0;
}

/* -- descriptors */

bool loop_watch(struct loop *loop, int fd, uint32_t mask, watch_call *call, void *context) {
    if ((size_t)fd >= loop->watch_room) {
        size_t room = 2 * (size_t)fd + 16;
        loop->watches = memory_resize(loop->watches, room * sizeof *loop->watches);
        for (size_t n = loop->watch_room; n < room; n++)
            loop->watches[n] = (struct watch){0};
        loop->watch_room = room;
    }
    struct watch *watch = &loop->watches[fd];
    bool known = watch->call != NULL;
    if (!known)
        watch->generation++;
    if (!known || watch->mask != mask) {
        /* The generation tells an event of this descriptor from one of an earlier of the same number. */
        uint64_t name = (uint64_t)watch->generation << 32 | (uint32_t)fd;
        struct epoll_event event = {.events = mask, .data.u64 = name};
        int failed = epoll_ctl(loop->epoll, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event);
        if (failed && !known && (errno == ENOSPC || errno == ENOMEM))
            return false;
        if (failed)
            memory_gone("descriptors can be watched");
    }
    watch->call = call;
    watch->context = context;
    watch->mask = mask;
    return true;
}

void loop_unwatch(struct loop *loop, int fd) {
    if (fd < 0 || (size_t)fd >= loop->watch_room || loop->watches[fd].call == NULL)
        return;
    loop->watches[fd].call = NULL;
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, fd, NULL);
}

static void deliver(struct loop *loop, const struct epoll_event *event) {
    struct watch *watch = &loop->watches[(uint32_t)event->data.u64];
    if (watch->call != NULL && watch->generation == event->data.u64 >> 32)
        watch->call(watch->context, event->events);
}

/* -- timers */

static bool sooner(const struct timer *a, const struct timer *b) {
    return a->due != b->due ? a->due < b->due : a->order < b->order;
}

static void put(struct loop *loop, size_t place, struct timer *timer) {
    loop->timers[place] = timer;
    timer->place = place;
}

/* Moves a timer from `place` to where it belongs. Places count from 1: the children of n are 2n, 2n + 1. */
static void settle(struct loop *loop, size_t place, struct timer *timer) {
    for (; place > 1 && sooner(timer, loop->timers[place / 2]); place /= 2)
        put(loop, place, loop->timers[place / 2]);
    for (size_t child; (child = 2 * place) <= loop->timer_count; place = child) {
        if (child < loop->timer_count && sooner(loop->timers[child + 1], loop->timers[child]))
            child++;
        if (!sooner(loop->timers[child], timer))
            break;
        put(loop, place, loop->timers[child]);
    }
    put(loop, place, timer);
}

void loop_after(struct loop *loop, struct timer *timer, double seconds, timer_call *call, void *context) {
    loop_cancel(loop, timer);
    if (!(seconds < LONGEST_SECONDS))
        return;
    *timer = (struct timer){now() + (int64_t)(seconds * NANOSECONDS), loop->order++, call, context, 0};
    if (loop->timer_count + 2 > loop->timer_room) {
        loop->timer_room = 2 * loop->timer_room + 16;
        loop->timers = memory_resize(loop->timers, loop->timer_room * sizeof(struct timer *));
    }
    settle(loop, ++loop->timer_count, timer);
}

void loop_cancel(struct loop *loop, struct timer *timer) {
    size_t place = timer->place;
    if (place == 0)
        return;
    timer->place = 0;
    struct timer *last = loop->timers[loop->timer_count--];
    if (last != timer)
        settle(loop, place, last);
}

/* Milliseconds to the next timer, rounded up; -1 when there is none. */
static int patience(const struct loop *loop) {
    if (loop->timer_count == 0)
        return -1;
    int64_t left = loop->timers[1]->due - now();
    if (left <= 0)
        return 0;
    int64_t milliseconds = (left + 999999) / 1000000;
    return milliseconds < INT_MAX ? (int)milliseconds : INT_MAX;
}

static void fire(struct loop *loop) {
    while (loop->timer_count != 0 && loop->timers[1]->due <= now()) {
        struct timer *timer = loop->timers[1];
        loop_cancel(loop, timer);
        timer->call(timer->context);
    }
}

/* -- running */

void loop_bury(struct loop *loop, void *object, void (*free)(void *object)) {
    if (loop->grave_count == loop->grave_room) {
        loop->grave_room = 2 * loop->grave_room + 16;
        loop->graves = memory_resize(loop->graves, loop->grave_room * sizeof *loop->graves);
    }
    loop->graves[loop->grave_count++] = (struct grave){object, free};
}

static void free_buried(struct loop *loop) {
    while (loop->grave_count != 0) {
        struct grave grave = loop->graves[--loop->grave_count];
        grave.free(grave.object);
    }
}

void loop_stop(struct loop *loop) {
    loop->stopped = true;
}

void loop_run(struct loop *loop) {
    struct epoll_event events[EVENTS_AT_ONCE];
    while (!loop->stopped) {
        int count = epoll_wait(loop->epoll, events, EVENTS_AT_ONCE, patience(loop));
        if (count < 0 && errno != EINTR)
            memory_gone("events can be waited for");
        for (int n = 0; n < count; n++)
            deliver(loop, &events[n]);
        fire(loop);
        free_buried(loop);
    }
}
