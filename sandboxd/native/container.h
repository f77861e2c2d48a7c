/* The guest as a container's first process. */
#ifndef SANDBOXD_CONTAINER_H
#define SANDBOXD_CONTAINER_H

/* Binds a socket at `path`, puts the system call filter in the file `filter` on (NULL: none), writes `ready`
 * to standard output when commands may come, and serves until SIGTERM. Returns the exit code. */
int container_main(const char *path, const char *ready, const char *filter);

#endif
