/* A warm service in C: answers every line with {"echo": <the line>}.
 *
 *     cc -O2 -o echo_service examples/services/echo_service.c
 *     ekiden worker --service warm-echo=./echo_service
 *
 * A JSON value is read and written as one line of text, so a program that only passes it on needs no
 * JSON library.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    char *line = NULL;
    size_t room = 0;
    ssize_t length;

    /* Whatever is slow to start belongs here. */
    puts("{\"ekiden\": \"ready\"}");
    fflush(stdout);

    while ((length = getline(&line, &room, stdin)) > 0) {
        if (line[length - 1] == '\n')
            line[length - 1] = '\0';
        printf("{\"echo\": %s}\n", line);
        fflush(stdout); /* ekiden waits for this answer */
    }
    free(line);
    return 0;
}
