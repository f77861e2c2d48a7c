/* The starter: makes sandboxes for the launcher. */
#ifndef SANDBOXD_STARTER_H
#define SANDBOXD_STARTER_H

/* `sandboxd-guest starter LAUNCHER_PID CONTROL_FD FD...`: serves the launcher whose pid that is, until it is
 * gone. `argv` is the whole command line. Returns the exit code. */
int starter_main(int argc, char **argv);

#endif
