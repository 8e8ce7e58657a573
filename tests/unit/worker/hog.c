/* A program for the tests: does as its first argument says, as real ones do when they fail. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "exit") == 0) {
        fprintf(stderr, "line one\nlast words\n");
        return atoi(argv[2]);
    }
    if (strcmp(what, "segv") == 0) {
        raise(SIGSEGV);
    }
    if (strcmp(what, "eat") == 0) {
        size_t block = 16 << 20;
        for (;;) {
            char *memory = malloc(block);
            if (memory == NULL) return 9;
            memset(memory, 1, block);
            usleep(5000);
        }
    }
    if (strcmp(what, "copy") == 0) {
        int sign;
        FILE *in = fopen(argv[2], "rb");
        FILE *out = fopen(argv[3], "wb");
        if (in == NULL || out == NULL) return 2;
        while ((sign = getc(in)) != EOF) putc(sign >= 'a' && sign <= 'z' ? sign - 32 : sign, out);
        return fclose(out);
    }
    for (int at = 1; at < argc; at++) printf("%s\n", argv[at]);
    return 0;
}
