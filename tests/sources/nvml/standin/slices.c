/* MIG, and the activity counters (GPM). */
#include "standin.h"

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    ENTER_WHOLE(device);
    *current = *pending = device->gpu->instance_count > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count)
{
    ENTER_WHOLE(device);
    *count = MAX_INSTANCES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **instance)
{
    ENTER_WHOLE(device);
    if ((int)index >= device->gpu->instance_count)
        return NOT_FOUND;
    *instance = &device->gpu->instances[index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(device_t *device, unsigned *id)
{
    ENTER(device);
    *id = (unsigned)device->instance + 7;
    return device->instance < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(device_t *device, unsigned *id)
{
    ENTER(device);
    *id = 0;
    return device->instance < 0 ? INVALID_ARGUMENT : SUCCESS;
}

typedef struct { unsigned sms, units[5], gpu_slices, compute_slices; unsigned long long mib; }
    attributes_t;

int nvmlDeviceGetAttributes_v2(device_t *device, attributes_t *attributes)
{
    ENTER(device);
    *attributes = (attributes_t){16, {1, 1, 0, 1, 0}, 1, 1, 16384};
    return device->instance < 0 ? NOT_SUPPORTED : SUCCESS;
}

#ifndef OLD_DRIVER
typedef struct { unsigned version, supported; } gpm_support_t;
typedef struct { const device_t *device; double percent[MAX_ACTIVITIES]; } gpm_sample_t;
typedef struct { unsigned id; int code; double value; const char *names[3]; } gpm_metric_t;
typedef struct {
    unsigned version, count;
    gpm_sample_t *older, *newer;
    gpm_metric_t metrics[];
} gpm_question_t;

int nvmlGpmQueryDeviceSupport(device_t *device, gpm_support_t *support)
{
    ENTER(device);
    if (support->version != 1)
        return VERSION_MISMATCH;
    support->supported = device->gpu->gpm != 0;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(gpm_sample_t **sample)
{
    ENTER(NULL);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

int nvmlGpmSampleFree(gpm_sample_t *sample)
{
    ENTER(NULL);
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(device_t *device, gpm_sample_t *sample)
{
    ENTER(device);
    if (!device->gpu->gpm)
        return NOT_SUPPORTED;
    sample->device = device;
    for (int i = 0; i < MAX_ACTIVITIES; i++)
        sample->percent[i] = device->gpu->activities[i].percent;
    return SUCCESS;
}

/* The mean of what was going on at the two samples. */
int nvmlGpmMetricsGet(gpm_question_t *question)
{
    ENTER(NULL);
    const gpm_sample_t *older = question->older, *newer = question->newer;
    if (question->version != 1)
        return VERSION_MISMATCH;
    if (!older->device || older->device != newer->device || older == newer)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < question->count; i++) {
        gpm_metric_t *metric = &question->metrics[i];
        const activity_t *known =
            metric->id < MAX_ACTIVITIES ? &newer->device->gpu->activities[metric->id] : NULL;
        metric->code = !known ? INVALID_ARGUMENT : known->known ? known->code : NOT_SUPPORTED;
        if (!metric->code)
            metric->value = (older->percent[metric->id] + newer->percent[metric->id]) / 2;
    }
    return SUCCESS;
}
#endif
