/* Script lines from a named pipe, for a test that scripts the library in another process. */
#include "standin.h"

static void *obey(void *path)
{
    FILE *lines = fopen(path, "r+");
    char line[256];
    while (lines && fgets(line, sizeof line, lines)) {
        line[strcspn(line, "\n")] = 0;
        if (standin_do(line))
            fprintf(stderr, "not understood: %s\n", line);
    }
    return NULL;
}

void obey_pipe(void)
{
    char *path = getenv("STANDIN_PIPE");
    pthread_t thread;
    if (path && !pthread_create(&thread, NULL, obey, path))
        pthread_detach(thread);
}
