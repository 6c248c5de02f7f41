/* Event sets. */
#include <errno.h>

#include "standin.h"

typedef struct { device_t *device; unsigned long long type, data; unsigned gi, ci; } event_data_t;

int nvmlEventSetCreate(set_t **set)
{
    ENTER(NULL);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].used) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].used = 1;
            *set = &sets[i];
            pthread_mutex_unlock(&lock);
            return SUCCESS;
        }
    abort();
}

int nvmlEventSetFree(set_t *set)
{
    pthread_mutex_lock(&lock);
    count_call(__func__);
    set->used = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return initialised ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetSupportedEventTypes(device_t *device, unsigned long long *types)
{
    ENTER_WHOLE(device);
    *types = (unsigned long long)device->gpu->events;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(device_t *device, unsigned long long types, set_t *set)
{
    ENTER_WHOLE(device);
    if (types & ~(unsigned long long)device->gpu->events)
        return NOT_SUPPORTED;
    set->registered[device->gpu->index] = 1;
    return SUCCESS;
}

static int pending_code(const set_t *set)
{
    int slow_ms, code = ruled("nvmlEventSetWait_v2", -1, &slow_ms);
    if (code)
        return code;
    if (!initialised)
        return UNINITIALIZED;
    if (!driver_loaded)
        return DRIVER_NOT_LOADED;
    for (int i = 0; i < MAX_GPUS; i++)
        if (set->registered[i] && gpus[i].lost)
            return gpus[i].lost;
    return SUCCESS;
}

/* With the lock held. */
static int next_event(set_t *set, event_data_t *data, const struct timespec *until)
{
    for (int code = SUCCESS;;) {
        while (!strcmp(held, "nvmlEventSetWait_v2"))
            pthread_cond_wait(&changed, &lock);
        if (set->count) {
            event_t event = set->events[0];
            memmove(set->events, set->events + 1, (size_t)--set->count * sizeof event);
            *data = (event_data_t){&gpus[event.gpu].self, XID_EVENT, event.xid, event.gi, event.ci};
            return SUCCESS;
        }
        if ((code = pending_code(set)))
            return code;
        if (pthread_cond_timedwait(&changed, &lock, until) == ETIMEDOUT)
            return TIMEOUT;
    }
}

int nvmlEventSetWait_v2(set_t *set, event_data_t *data, unsigned timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long ns = until.tv_nsec + (long)(timeout_ms % 1000) * 1000000;
    until.tv_sec += timeout_ms / 1000 + ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    pthread_mutex_lock(&lock);
    count_call(__func__);
    int code = next_event(set, data, &until);
    pthread_mutex_unlock(&lock);
    return code;
}
