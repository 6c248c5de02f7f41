/* Life cycle, identity, and the calls that return one value each. */
#include "standin.h"

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    count_call(__func__);
    while (!strcmp(held, __func__))
        pthread_cond_wait(&changed, &lock);
    int code = driver_loaded ? init_code : DRIVER_NOT_LOADED;
    initialised += code == SUCCESS;
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    count_call(__func__);
    int code = initialised ? SUCCESS : UNINITIALIZED;
    initialised -= initialised > 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return code;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error of the stand-in";
}

int nvmlSystemGetDriverVersion(char *version_text, unsigned length)
{
    ENTER(NULL);
    snprintf(version_text, length, "%s", version);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(NULL);
    *count = (unsigned)gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device)
{
    if ((int)index >= gpu_count)
        return INVALID_ARGUMENT;
    ENTER(&gpus[index].self);
    *device = &gpus[index].self;
    return SUCCESS;
}

int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned length)
{
    ENTER(device);
    if (device->instance < 0)
        snprintf(uuid, length, "GPU-00000000-0000-4000-8000-%012d", device->gpu->index);
    else
        snprintf(uuid, length, "MIG-00000000-0000-4000-8000-%06d%06d", device->gpu->index,
                 device->instance);
    return SUCCESS;
}

int nvmlDeviceGetName(device_t *device, char *name, unsigned length)
{
    ENTER(device);
    snprintf(name, length, "%s", device->instance < 0 ? "NVIDIA H200" : "NVIDIA H200 MIG 1g.18gb");
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;

/* The first version counts what is reserved as used. */
int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory)
{
    ENTER(device);
    gpu_t *gpu = device->gpu;
    double taken = gpu->memory_used + gpu->memory_reserved;
    memory->total = (unsigned long long)gpu->memory_total;
    memory->used = (unsigned long long)taken;
    memory->free = (unsigned long long)(gpu->memory_total - taken);
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory)
{
    ENTER(device);
    if (memory->version != (sizeof *memory | 2u << 24))
        return VERSION_MISMATCH;
    gpu_t *gpu = device->gpu;
    double share = device->instance < 0 ? 1 : 1.0 / 8;
    memory->total = (unsigned long long)(gpu->memory_total * share);
    memory->reserved = (unsigned long long)(gpu->memory_reserved * share);
    memory->used = (unsigned long long)(gpu->memory_used * share);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}
#endif

int nvmlDeviceGetUtilizationRates(device_t *device, unsigned rates[2])
{
    ENTER_WHOLE(device);
    if (device->gpu->instance_count)
        return NOT_SUPPORTED;
    rates[0] = (unsigned)device->gpu->utilization;
    rates[1] = (unsigned)device->gpu->memory_busy;
    return SUCCESS;
}

static int clock_of(double sm, double memory, unsigned kind, unsigned *mhz)
{
    if (kind != 1 && kind != 2)
        return NOT_SUPPORTED;
    *mhz = (unsigned)(kind == 1 ? sm : memory);
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(device_t *device, unsigned kind, unsigned *mhz)
{
    ENTER_WHOLE(device);
    return clock_of(device->gpu->sm_clock, device->gpu->memory_clock, kind, mhz);
}

int nvmlDeviceGetMaxClockInfo(device_t *device, unsigned kind, unsigned *mhz)
{
    ENTER_WHOLE(device);
    return clock_of(device->gpu->sm_clock_max, device->gpu->memory_clock_max, kind, mhz);
}

int nvmlDeviceGetTemperature(device_t *device, unsigned sensor, unsigned *celsius)
{
    ENTER_WHOLE(device);
    *celsius = (unsigned)device->gpu->temperature;
    return sensor ? INVALID_ARGUMENT : SUCCESS;
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; int sensor, celsius; } temperature_t;

int nvmlDeviceGetTemperatureV(device_t *device, temperature_t *temperature)
{
    ENTER_WHOLE(device);
    if (temperature->version != (sizeof *temperature | 1u << 24))
        return VERSION_MISMATCH;
    temperature->celsius = (int)device->gpu->temperature;
    return temperature->sensor ? INVALID_ARGUMENT : SUCCESS;
}
#endif

int nvmlDeviceGetPowerUsage(device_t *device, unsigned *milliwatts)
{
    ENTER_WHOLE(device);
    *milliwatts = (unsigned)device->gpu->power;
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(device_t *device, unsigned *milliwatts)
{
    ENTER_WHOLE(device);
    *milliwatts = (unsigned)device->gpu->power_limit;
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(device_t *device, unsigned *enabled)
{
    ENTER_WHOLE(device);
    *enabled = (unsigned)device->gpu->persistence;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t *device, unsigned long long *millijoules)
{
    ENTER_WHOLE(device);
    *millijoules = (unsigned long long)device->gpu->fields[83].number;
    return SUCCESS;
}

#define REASONS(name, number)                                                                      \
    int name(device_t *device, unsigned long long *reasons)                                        \
    {                                                                                              \
        ENTER_WHOLE(device);                                                                       \
        *reasons = (unsigned long long)device->gpu->number;                                        \
        return SUCCESS;                                                                            \
    }
REASONS(nvmlDeviceGetCurrentClocksThrottleReasons, throttle)
REASONS(nvmlDeviceGetSupportedClocksThrottleReasons, throttle_known)
#ifndef OLD_DRIVER
REASONS(nvmlDeviceGetCurrentClocksEventReasons, throttle)
REASONS(nvmlDeviceGetSupportedClocksEventReasons, throttle_known)
#endif

/* Blocks for its 20 ms, like the real one. */
int nvmlDeviceGetPcieThroughput(device_t *device, unsigned counter, unsigned *kib_per_s)
{
    ENTER_WHOLE(device);
    (void)counter;
    usleep(20000);
    *kib_per_s = 0;
    return SUCCESS;
}
