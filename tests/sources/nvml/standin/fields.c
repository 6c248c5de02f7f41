/* Field values and lists of processes. */
#include "standin.h"

typedef struct {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    int code;
    union { double d; unsigned u; unsigned long ul; unsigned long long ull; } value;
} field_value_t;

static int needs_link(unsigned id)
{
    return (id >= 138 && id <= 141) || (id >= 201 && id <= 215);
}

static void answer_field(const gpu_t *gpu, field_value_t *value)
{
    const field_t *known = value->id < MAX_FIELDS ? &gpu->fields[value->id] : NULL;
#ifdef OLD_DRIVER
    if (value->id > 184)
        known = NULL;
#endif
    value->timestamp = (long long)(seconds() * 1e6);
    value->code = !known ? INVALID_ARGUMENT : known->known ? known->code : NOT_SUPPORTED;
    if (value->code)
        return;
    if (needs_link(value->id) && value->scope != ALL_LINKS) {
        value->code = INVALID_ARGUMENT;
        return;
    }
    double number = known->number;
    if (value->id == 83 && gpu->energy_moves)
        number += gpu->power * seconds();
    value->type = (unsigned)known->type;
    if (known->type == NARROW)
        /* Nobody promises what the other half holds. */
        value->value.ull = 0xdeadbeef00000000ull | (unsigned)number;
    else
        value->value.ull = number < 0 ? UINT64_MAX : (unsigned long long)number;
}

int nvmlDeviceGetFieldValues(device_t *device, int count, field_value_t *values)
{
    ENTER_WHOLE(device);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        answer_field(device->gpu, &values[i]);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } process_info_t;

static int list_processes(const device_t *device, const char *list, unsigned *room,
                          process_info_t *into)
{
    const gpu_t *gpu = device->gpu;
    unsigned found = 0;
    for (int i = 0; i < gpu->process_count; i++) {
        const process_t *process = &gpu->processes[i];
        if (strcmp(process->list, list))
            continue;
        if (into && found < *room)
            into[found] = (process_info_t){process->pid, process->bytes, NO_INSTANCE, NO_INSTANCE};
        found++;
    }
    int code = found > *room ? INSUFFICIENT_SIZE : SUCCESS;
    *room = found;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *room, process_info_t *into)
{
    ENTER(device);
    return list_processes(device, "compute", room, into);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned *room,
                                               process_info_t *into)
{
    ENTER(device);
    return list_processes(device, "mps", room, into);
}
