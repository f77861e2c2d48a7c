/* Finds and kills every process that a command started, however it detached itself. */
#include "tree.h"

#include "buffer.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Above any real use of the limit (11 days), below infinity. */
static const uint64_t FIRST_TAG = UINT64_C(1000000000000), TAGS = UINT64_C(1000000000);
/* Each pass kills what it finds; a process that forks quickly needs several. */
enum { PASSES = 20 };

static uint64_t key[TREE_KEY_BYTES / sizeof(uint64_t)];

void tree_set_key(const char *bytes) {
    memcpy(key, bytes, sizeof key);
}

static bool set_soft(const struct tagger *tagger, uint64_t soft) {
    struct rlimit limit = {soft, tagger->hard};
    /* The kernel takes four arguments; the filter looks at the two behind them as well. */
    return syscall(SYS_prlimit64, 0, RLIMIT_RTTIME, &limit, NULL, key[0], key[1]) == 0;
}

void tagger_open(struct tagger *tagger) {
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_RTTIME, &limit);
    /* From a place of its own: a guest that is no PID 1 sees processes of others, which have tags as well. */
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random)
        random = (uint64_t)getpid();
    *tagger = (struct tagger){.hard = limit.rlim_max, .count = random % TAGS};
    tagger->works = limit.rlim_max == RLIM_INFINITY || limit.rlim_max > FIRST_TAG + TAGS;
}

uint64_t tagger_take(struct tagger *tagger) {
    if (!tagger->works)
        return 0;
    tagger->count = (tagger->count + 1) % TAGS;
    tagger->works = set_soft(tagger, FIRST_TAG + tagger->count);
    return tagger->works ? FIRST_TAG + tagger->count : 0;
}

void tagger_drop(struct tagger *tagger) {
    if (tagger->works)
        set_soft(tagger, tagger->hard);
}

struct process {
    pid_t pid, parent, session;
    bool member;
};

struct processes {
    struct process *rows;
    size_t count, room;
};

/* False for one that is gone or a zombie. */
static bool look_at(int proc, const char *name, struct process *process) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "%.32s/stat", name);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t count = read(fd, text, sizeof text - 1);
    close(fd);
    text[count > 0 ? count : 0] = 0;
    /* The name before it may hold anything, also parentheses. */
    const char *after = strrchr(text, ')');
    char state;
    int parent, session;
    if (after == NULL || sscanf(after, ") %c %d %*d %d", &state, &parent, &session) != 3)
        return false;
    *process = (struct process){atoi(name), parent, session, false};
    return state != 'Z' && state != 'X';
}

/* All that are not yet zombies. */
static void look(struct processes *found) {
    found->count = 0;
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return;
    for (struct dirent *entry; (entry = readdir(proc)) != NULL;) {
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        if (found->count == found->room) {
            found->room = 2 * found->room + 64;
            found->rows = memory_resize(found->rows, found->room * sizeof *found->rows);
        }
        found->count += look_at(dirfd(proc), entry->d_name, &found->rows[found->count]);
    }
    closedir(proc);
}

/* What everybody may read of a process's limits; 0 where that does not say it. */
static uint64_t read_tag(pid_t pid) {
    static const char LINE[] = "\nMax realtime timeout";
    char path[32], text[4096];
    snprintf(path, sizeof path, "/proc/%d/limits", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t count = read(fd, text, sizeof text - 1);
    close(fd);
    text[count > 0 ? count : 0] = 0;
    const char *line = strstr(text, LINE);
    /* "unlimited" is no tag. */
    return line != NULL ? strtoull(line + sizeof LINE - 1, NULL, 10) : 0;
}

static bool carries(pid_t pid, uint64_t tag) {
    struct rlimit limit;
    if (prlimit(pid, RLIMIT_RTTIME, NULL, &limit) == 0)
        return limit.rlim_cur == tag;
    /* One of another user's, which only they may ask so. */
    return errno == EPERM && read_tag(pid) == tag;
}

static int by_pid(const void *left, const void *right) {
    const struct process *a = left, *b = right;
    return (a->pid > b->pid) - (a->pid < b->pid);
}

static bool member(const struct processes *all, pid_t pid) {
    struct process key = {.pid = pid};
    const struct process *found = bsearch(&key, all->rows, all->count, sizeof key, by_pid);
    return found != NULL && found->member;
}

static void mark_members(struct processes *all, uint64_t tag, pid_t root) {
    for (size_t n = 0; n < all->count; n++) {
        struct process *row = &all->rows[n];
        /* Without a tag, a reaped root leaves its session, whose number the kernel keeps from reuse. */
        row->member = root != 0 && (row->pid == root || row->session == root);
        row->member = row->member || (tag != 0 && carries(row->pid, tag));
    }
    if (root == 0 || all->count == 0)
        return;
    qsort(all->rows, all->count, sizeof *all->rows, by_pid);
    for (bool more = true; more;) {
        more = false;
        for (size_t n = 0; n < all->count; n++) {
            struct process *row = &all->rows[n];
            if (!row->member && member(all, row->parent))
                row->member = more = true;
        }
    }
}

bool tree_kill(uint64_t tag, pid_t root) {
    struct processes all = {NULL, 0, 0};
    pid_t self = getpid();
    bool dead = false;
    for (int pass = 0; pass < PASSES && !dead; pass++) {
        dead = true;
        look(&all);
        mark_members(&all, tag, root);
        for (size_t n = 0; n < all.count; n++) {
            if (!all.rows[n].member || all.rows[n].pid == self)
                continue;
            dead = false;
            kill(all.rows[n].pid, SIGKILL);
        }
    }
    free(all.rows);
    return dead;
}
