/* What every call goes through. */
#include "standin.h"

static struct { char function[64]; int count; } counted[MAX_COUNTED];

void forget_counts(void)
{
    memset(counted, 0, sizeof counted);
}

/* How often a function was called since the last `gpus`. */
int standin_calls(const char *function)
{
    for (int i = 0; i < MAX_COUNTED; i++)
        if (!strcmp(counted[i].function, function))
            return counted[i].count;
    return 0;
}

void count_call(const char *function)
{
    for (int i = 0; i < MAX_COUNTED; i++) {
        if (!*counted[i].function)
            snprintf(counted[i].function, sizeof counted->function, "%s", function);
        if (!strcmp(counted[i].function, function)) {
            counted[i].count++;
            return;
        }
    }
    abort();
}

int ruled(const char *function, int gpu, int *slow_ms)
{
    int code = SUCCESS;
    for (int i = 0; i < rule_count; i++)
        if ((rules[i].gpu == -1 || rules[i].gpu == gpu) && !strcmp(rules[i].function, function)) {
            code = rules[i].code ? rules[i].code : code;
            *slow_ms = rules[i].slow_ms ? rules[i].slow_ms : *slow_ms;
        }
    return code;
}

int enter(const char *function, const device_t *device)
{
    int slow_ms = 0, code = SUCCESS;
    pthread_mutex_lock(&lock);
    count_call(function);
    while (!strcmp(held, function))
        pthread_cond_wait(&changed, &lock);
    code = ruled(function, device ? device->gpu->index : -1, &slow_ms);
    if (device && device->instance >= 0 && device->gpu->instance_lost[device->instance])
        code = device->gpu->instance_lost[device->instance];
    if (device && device->gpu->lost)
        code = device->gpu->lost;
    if (!driver_loaded)
        code = DRIVER_NOT_LOADED;
    if (!initialised)
        code = UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    if (slow_ms)
        usleep((useconds_t)slow_ms * 1000);
    return code;
}
