/* Finds and kills every process that a command started, however it detached itself.
 *
 * A process group ends with `setsid`, a parent link with a double fork, and an environment variable with an
 * exec. A resource limit is passed on by all three: each command runs under its own value of RLIMIT_RTTIME,
 * which means nothing to a process that may not become real-time, and which the sandbox's seccomp filter
 * lets nobody change but who shows a key: PID 1, which nobody can read. Where limits of others cannot be
 * read (gVisor), parents and sessions serve.
 * Chosen over a pid namespace per command: background processes may outlive their command, and PID 1 keeps
 * no privilege to make namespaces with. Chosen over a subreaper per command: that costs one more fork. */
#ifndef SANDBOXD_TREE_H
#define SANDBOXD_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Gives each command its value; only the soft limit moves, so that it can be taken back. */
struct tagger {
    uint64_t count, hard;
    bool works;
};

enum { TREE_KEY_BYTES = 16 };

/* Takes the key that the filter asks for; before the first tag. */
void tree_set_key(const char *bytes);

void tagger_open(struct tagger *tagger);
/* Sets the next tag on this process, for the child about to be made; 0 where there are none. */
uint64_t tagger_take(struct tagger *tagger);
/* Takes the tag off this process again. */
void tagger_drop(struct tagger *tagger);

/* Kills what carries `tag` or descends from the unreaped child `root` (0: there is none any more).
 * Returns true once a look finds nothing of it alive. */
bool tree_kill(uint64_t tag, pid_t root);

#endif
