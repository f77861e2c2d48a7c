/* Why an operation failed: the system's number and a line that says it. */
#include "fault.h"

#include <stdio.h>
#include <string.h>

bool fault_os(struct fault *fault, int number) {
    return fault_say(fault, number, strerror(number));
}

bool fault_say(struct fault *fault, int number, const char *text) {
    fault->number = number;
    snprintf(fault->text, sizeof fault->text, "%s", text);
    return false;
}

bool fault_about(struct fault *fault, const char *what, const char *name) {
    char text[sizeof fault->text];
    size_t rest = strlen(fault->text), begin = strlen(what);
    memcpy(text, fault->text, rest + 1);
    /* What is too much is the name's: the reason says more. */
    size_t length = begin + 2 + rest < FAULT_BYTES ? strnlen(name, FAULT_BYTES - begin - 2 - rest) : 0;
    memcpy(fault->text, what, begin);
    memcpy(fault->text + begin, name, length);
    snprintf(fault->text + begin + length, sizeof fault->text - begin - length, ": %s", text);
    return false;
}
