/* Who a command runs as: from a name to numbers, and from this process's rights to none. */
#include "identity.h"

#include "buffer.h"
#include "guest.h"
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As many users and groups as a sandbox has, from 0 on. */
enum { IDS = 1 << 16 };
/* Whoever is root in there may have written these files. */
enum { FILE_BYTES = 1 << 20, READ_BYTES = 16 << 10 };
enum { FIELDS = 7 };
static const char PASSWD[] = "/etc/passwd", GROUP[] = "/etc/group";

static bool has_rights;

void identity_open(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct held[_LINUX_CAPABILITY_U32S_3] = {{0, 0, 0}, {0, 0, 0}};
    has_rights = syscall(SYS_capget, &header, held) == 0 && (held[0].permitted | held[1].permitted) != 0;
}

/* -- the files */

static bool read_all(int fd, struct buffer *text, struct fault *fault) {
    struct stat status;
    if (fstat(fd, &status) != 0)
        return fault_os(fault, errno);
    if (!S_ISREG(status.st_mode))
        return fault_say(fault, EINVAL, "not a regular file");
    for (;;) {
        ssize_t count = read(fd, buffer_room(text, READ_BYTES), READ_BYTES);
        if (count < 0)
            return fault_os(fault, errno);
        if (count == 0)
            return true;
        buffer_grew(text, (size_t)count);
        if (buffer_size(text) > FILE_BYTES)
            return fault_say(fault, EFBIG, "longer than 1 MiB");
    }
}

/* The lines of a file; none where it is missing. False with the fault. */
static bool read_lines(const char *path, struct buffer *text, struct fault *fault) {
    /* Nothing that lies there may hold this process up: a pipe, a lease. */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return true;
    bool right = fd < 0 ? fault_os(fault, errno) : read_all(fd, text, fault);
    if (fd >= 0)
        close(fd);
    if (!right)
        return fault_about(fault, path, "");
    /* Perhaps the last line has no end. */
    buffer_add(text, "\n", 1);
    return true;
}

/* Takes the next line off the text, cut into its fields; what it lacks is empty. False past the last. */
static bool next_entry(struct buffer *text, char **fields) {
    char *at = buffer_at(text), *end = memchr(at, '\n', buffer_size(text));
    if (end == NULL)
        return false;
    *end = 0;
    for (int n = 0; n < FIELDS; n++) {
        fields[n] = at;
        at += strcspn(at, ":");
        if (*at != 0)
            *at++ = 0;
    }
    /* Not by buffer_take, which may free what the fields point to. */
    text->begin = (size_t)(end + 1 - text->data);
    return true;
}

/* -1: it is no number. One that no sandbox has is IDS or more. */
static int64_t number_of(const char *text) {
    int64_t number = 0;
    if (*text == 0)
        return -1;
    for (; *text != 0; text++) {
        if (*text < '0' || *text > '9')
            return -1;
        if (number < IDS)
            number = 10 * number + (*text - '0');
    }
    return number;
}

static bool take_id(int64_t number, uint32_t *id, struct fault *fault) {
    if (number >= IDS)
        return fault_say(fault, EINVAL, "users and groups are from 0 to 65535");
    *id = (uint32_t)number;
    return true;
}

/* -- who it is */

static void take_home(struct identity *identity, const char *home) {
    struct buffer text = {0};
    buffer_add(&text, "HOME=", 5);
    if (*home == 0)
        home = "/";
    buffer_add(&text, home, strlen(home));
    free(identity->home);
    identity->home = memory_copy(buffer_at(&text), buffer_size(&text));
    buffer_free(&text);
}

/* The user's number, its group and its home. `name` becomes the one of its entry, NULL where it has none: a
 * number needs none, and is then of group 0. */
static bool find_user(struct identity *identity, char **name, struct buffer *passwd, struct fault *fault) {
    int64_t wanted = number_of(*name);
    char *fields[FIELDS];
    while (next_entry(passwd, fields)) {
        int64_t user = number_of(fields[2]), group = number_of(fields[3]);
        bool same = wanted >= 0 ? user == wanted : strcmp(fields[0], *name) == 0;
        if (!same || user < 0 || group < 0)
            continue;
        *name = fields[0];
        take_home(identity, fields[5]);
        return take_id(user, &identity->user, fault) && take_id(group, &identity->groups[0], fault);
    }
    *name = NULL;
    if (wanted < 0)
        return fault_say(fault, EINVAL, "not in /etc/passwd");
    take_home(identity, "");
    return take_id(wanted, &identity->user, fault);
}

static bool find_group(struct identity *identity, const char *name, struct buffer *groups,
                       struct fault *fault) {
    int64_t wanted = number_of(name);
    char *fields[FIELDS];
    while (wanted < 0 && next_entry(groups, fields))
        if (strcmp(fields[0], name) == 0)
            wanted = number_of(fields[2]);
    if (wanted < 0)
        return fault_say(fault, EINVAL, "the group is not in /etc/group");
    return take_id(wanted, &identity->groups[0], fault);
}

static bool is_listed(char *names, const char *name) {
    for (char *rest = names, *each; (each = strsep(&rest, ",")) != NULL;)
        if (strcmp(each, name) == 0)
            return true;
    return false;
}

/* The groups that name the user among their members. */
static bool find_memberships(struct identity *identity, const char *name, struct buffer *groups,
                             struct fault *fault) {
    char *fields[FIELDS];
    while (next_entry(groups, fields)) {
        int64_t group = number_of(fields[2]);
        if (group < 0 || !is_listed(fields[3], name))
            continue;
        if (identity->group_count == IDENTITY_GROUPS)
            return fault_say(fault, E2BIG, "in more groups than a command may have, which are 256");
        if (!take_id(group, &identity->groups[identity->group_count], fault))
            return false;
        identity->group_count++;
    }
    return true;
}

/* Supplementary groups are for whom no group was named. */
static bool find_both(struct identity *identity, char *name, const char *group, struct fault *fault) {
    struct buffer passwd = {0}, groups = {0};
    bool by_number = group != NULL && number_of(group) >= 0;
    bool found = read_lines(PASSWD, &passwd, fault);
    if (!found && by_number && number_of(name) >= 0) {
        /* All is said but a home: so root can mend what is not to be read. */
        buffer_free(&passwd);
        found = true;
    }
    found = found && find_user(identity, &name, &passwd, fault);
    if (found && (group != NULL || name != NULL))
        found = (by_number || read_lines(GROUP, &groups, fault)) &&
                (group != NULL ? find_group(identity, group, &groups, fault)
                               : find_memberships(identity, name, &groups, fault));
    buffer_free(&passwd);
    buffer_free(&groups);
    return found;
}

bool identity_find(struct identity *identity, const char *user, struct fault *fault) {
    *identity = (struct identity){.given = user != NULL, .group_count = 1};
    if (user == NULL)
        return true;
    char *name = memory_copy(user, strlen(user)), *group = strchr(name, ':');
    if (group != NULL)
        *group++ = 0;
    bool found = find_both(identity, name, group, fault) || fault_about(fault, "user ", user);
    free(name);
    if (!found)
        identity_free(identity);
    return found;
}

void identity_free(struct identity *identity) {
    free(identity->home);
    identity->home = NULL;
}

/* -- becoming it */

/* Neither says whether it worked; asked for what is no number, both tell the present one. */
static bool make_files_as(uid_t user, gid_t group) {
    setfsgid(group);
    setfsuid(user);
    return (gid_t)setfsgid((gid_t)-1) == group && (uid_t)setfsuid((uid_t)-1) == user;
}

bool identity_put_on(const struct identity *identity, int *death_signal) {
    if (!identity->given)
        return true;
    /* The kernel takes it for another program's, and forgets it. Until it is back the lifeline alone ends
     * this process when its parent does. */
    prctl(PR_GET_PDEATHSIG, death_signal);
    if (make_files_as(identity->user, identity->groups[0]))
        return true;
    identity_take_off(identity, *death_signal);
    return false;
}

void identity_take_off(const struct identity *identity, int death_signal) {
    if (!identity->given)
        return;
    /* The files that the daemon asks for must not be that user's. */
    if (!make_files_as(geteuid(), getegid()))
        memory_gone("memory to be itself again");
    prctl(PR_SET_PDEATHSIG, (unsigned long)death_signal, 0UL, 0UL, 0UL);
    identity_close(identity);
}

void identity_close(const struct identity *identity) {
    if (identity->given)
        prctl(PR_SET_DUMPABLE, (unsigned long)GUEST_DUMPABLE, 0UL, 0UL, 0UL);
}

/* By plain system calls: the C library's would have all threads of this memory follow. */
static IN_CHILD bool change(const struct identity *identity) {
    uid_t user = identity->user;
    gid_t group = identity->groups[0];
    return syscall(SYS_setgroups, identity->group_count, identity->groups) == 0 &&
           syscall(SYS_setresgid, group, group, group) == 0 &&
           syscall(SYS_setresuid, user, user, user) == 0;
}

IN_CHILD bool identity_become(const struct identity *identity) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct nothing[_LINUX_CAPABILITY_U32S_3] = {{0, 0, 0}, {0, 0, 0}};
    /* In this order. Its memory is this process's until its program begins, and another process of that user
     * may trace it as soon as it has no more rights than that one, unless the memory is closed. */
    if (identity->given && (!change(identity) || prctl(PR_SET_DUMPABLE, 0UL, 0UL, 0UL, 0UL) != 0))
        return false;
    return !has_rights || syscall(SYS_capset, &header, nothing) == 0;
}
