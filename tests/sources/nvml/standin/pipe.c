/* Script lines for a library in another process: from its environment, then from a named pipe. */
#include "standin.h"

static void obey_line(const char *line)
{
    if (standin_do(line))
        fprintf(stderr, "not understood: %s\n", line);
}

static void *obey(void *path)
{
    FILE *lines = fopen(path, "r+");
    char line[256];
    while (lines && fgets(line, sizeof line, lines)) {
        line[strcspn(line, "\n")] = 0;
        obey_line(line);
    }
    return NULL;
}

void obey_script(void)
{
    char *lines = getenv("STANDIN_SCRIPT"), *rest;
    if (!lines || !(lines = strdup(lines)))
        return;
    for (char *line = strtok_r(lines, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        obey_line(line);
    free(lines);
}

void obey_pipe(void)
{
    char *path = getenv("STANDIN_PIPE");
    pthread_t thread;
    if (path && !pthread_create(&thread, NULL, obey, path))
        pthread_detach(thread);
}
