/* The GPUs as they are before a script changes them. */
#include "standin.h"

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed;
gpu_t gpus[MAX_GPUS];
int gpu_count, initialised, driver_loaded, init_code;
rule_t rules[MAX_RULES];
int rule_count;
char held[64], version[32];
set_t sets[MAX_SETS];
static struct timespec started;

double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - started.tv_sec) + 1e-9 * (double)(now.tv_nsec - started.tv_nsec);
}

void set_field(gpu_t *gpu, unsigned id, double number)
{
    gpu->fields[id] = (field_t){1, SUCCESS, WIDE, number};
}

static void make_idle_h200(int index)
{
    gpu_t *gpu = &gpus[index];
    memset(gpu, 0, sizeof *gpu);
    gpu->index = index;
    gpu->self = (device_t){gpu, -1};
    for (int i = 0; i < MAX_INSTANCES; i++)
        gpu->instances[i] = (device_t){gpu, i};
    const double mib = 1024 * 1024;
    gpu->memory_total = 143771 * mib;
    gpu->memory_reserved = 614 * mib;
    gpu->memory_used = 0;
    gpu->sm_clock = 345, gpu->sm_clock_max = 1980;
    gpu->memory_clock = 3201, gpu->memory_clock_max = 3201;
    gpu->throttle = 1, gpu->throttle_known = 0x1ff;
    gpu->temperature = 32, gpu->power = 78000, gpu->power_limit = 700000, gpu->persistence = 1;
    gpu->events = XID_EVENT, gpu->gpm = 1, gpu->energy_moves = 1;
    const unsigned zero[] = {3, 4, 5, 6, 74, 76, 94, 142, 143, 144, 145, 230, 269, 270, 271};
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++)
        set_field(gpu, zero[i], 0);
    set_field(gpu, 1, 1);
    set_field(gpu, 82, 36);
    set_field(gpu, 83, 5e9);
    set_field(gpu, 185, gpu->power);
    set_field(gpu, 186, gpu->power);
    set_field(gpu, 197, 1e9);
    set_field(gpu, 198, 2e9);
    set_field(gpu, 138, 1000);
    set_field(gpu, 139, 2000);
    set_field(gpu, 38, 0);
    set_field(gpu, 45, 0);
    set_field(gpu, 52, 0);
    set_field(gpu, 59, 0);
    const unsigned activities[] = {1, 2, 3, 5, 10};
    for (size_t i = 0; i < sizeof activities / sizeof *activities; i++)
        gpu->activities[activities[i]] = (activity_t){1, SUCCESS, 0};
}

void reset(int count)
{
    gpu_count = count, driver_loaded = 1, init_code = SUCCESS, rule_count = 0, *held = 0;
    snprintf(version, sizeof version, "%s", DRIVER_VERSION);
    forget_counts();
    for (int i = 0; i < MAX_GPUS; i++)
        make_idle_h200(i);
    for (int i = 0; i < MAX_SETS; i++)
        sets[i].count = 0;
}

__attribute__((constructor)) static void begin(void)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    clock_gettime(CLOCK_MONOTONIC, &started);
    const char *count = getenv("STANDIN_GPUS");
    reset(count ? atoi(count) : 1);
    /* Held from the first call on, which no pipe is early enough for. */
    snprintf(held, sizeof held, "%s", getenv("STANDIN_HELD") ? getenv("STANDIN_HELD") : "");
    obey_script();
    obey_pipe();
}
