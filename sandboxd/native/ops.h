/* The single steps. Each returns 0, or -1 with errno; its arguments are of the kinds that the table in
 * steps.c lists. */
#ifndef SANDBOXD_OPS_H
#define SANDBOXD_OPS_H

#include "steps.h"

typedef int op(struct start *start, const struct argument *a);

/* places.c */
op op_mkdir, op_rename, op_makedirs, op_listen, op_open, op_write, op_close, op_workspace, op_chdir, op_give;
/* confine.c */
op op_unshare, op_mount, op_umount, op_chroot, op_hostname, op_loopback, op_rlimit, op_user, op_bounding;
op op_capabilities, op_prctl, op_keep, op_title, op_setsid, op_alive, op_seccomp, op_key;
op op_into, op_join;

/* Where this process keeps its command line, for the step that overwrites it. */
void title_find(int argc, char **argv);
void title_set(const char *title);

#endif
