/* The starter: makes sandboxes for the launcher. */
#ifndef SANDBOXD_STARTER_H
#define SANDBOXD_STARTER_H

/* `sandboxd-guest starter ...`. Returns the exit code. */
int starter_main(int argc, char **argv);

#endif
