/* Why an operation failed: the system's number and a line that says it. */
#ifndef SANDBOXD_FAULT_H
#define SANDBOXD_FAULT_H

#include <stdbool.h>

/* The rest of a longer message is cut off. */
enum { FAULT_BYTES = 1024 };

struct fault {
    int number;
    char text[FAULT_BYTES + 1];
};

/* Each returns false, so that a function that fails can end with one. */
bool fault_os(struct fault *fault, int number);
bool fault_say(struct fault *fault, int number, const char *text);
/* Puts what it is about before the text that is there: a few words, and a name. */
bool fault_about(struct fault *fault, const char *what, const char *name);

#endif
