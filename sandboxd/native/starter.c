/* The starter is not written yet. */
#include "starter.h"

#include <stdio.h>

int starter_main(int argc, char **argv) {
    (void)argc;
    fprintf(stderr, "%s: this build has no starter\n", argv[0]);
    return 2;
}
