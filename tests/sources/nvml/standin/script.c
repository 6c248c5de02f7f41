/* A stand-in for libnvidia-ml.so.1 whose GPUs are scripted, line by line, through standin_do().
 *
 * Written from the public binary interface (names, structure layouts, return codes). Its GPUs look
 * like idle H200s until a script says otherwise. Lines, with G a GPU's index or -1 for all:
 *
 *   gpus N                       N GPUs, as at the start
 *   driver 0|1                   unload or load the driver
 *   version VERSION              what the driver calls itself
 *   init RC                      what initialisation returns
 *   lose G RC                    every call on the GPU returns RC; 0 brings it back
 *   answer G FUNCTION RC         this function returns RC; 0 takes that back
 *   slow G FUNCTION MS           this function takes so long; 0 takes that back
 *   hold FUNCTION | release      this function does not return, until release
 *   set G NAME NUMBER            see numbers[]
 *   field G ID NUMBER            a field value, 64 bits wide
 *   narrow G ID NUMBER           the same, 32 bits wide
 *   odd G ID TYPE                a field whose value is of another type
 *   nofield G ID RC              a field that is answered with RC
 *   activity G ID PERCENT        a GPM metric; `nan` is a number
 *   noactivity G ID RC
 *   process G LIST PID BYTES     LIST is compute or mps; BYTES -1 is "not available"
 *   mig G N                      N instances, 0 ends MIG
 *   loseinstance G I RC          every call on the instance returns RC
 *   xid G NUMBER GI CI           an event; -1 for no instance
 */
#include "standin.h"

static const struct { const char *name; size_t at; } numbers[] = {
#define NUMBER(name) {#name, offsetof(gpu_t, name)}
    NUMBER(memory_total), NUMBER(memory_reserved), NUMBER(memory_used), NUMBER(utilization),
    NUMBER(memory_busy), NUMBER(sm_clock), NUMBER(memory_clock), NUMBER(sm_clock_max),
    NUMBER(memory_clock_max), NUMBER(throttle), NUMBER(throttle_known), NUMBER(temperature),
    NUMBER(power), NUMBER(power_limit), NUMBER(persistence), NUMBER(events), NUMBER(gpm), NUMBER(energy_moves),
};

static rule_t *rule_for(int gpu, const char *function)
{
    for (int i = 0; i < rule_count; i++)
        if (rules[i].gpu == gpu && !strcmp(rules[i].function, function))
            return &rules[i];
    if (rule_count == MAX_RULES)
        abort();
    rules[rule_count] = (rule_t){.gpu = gpu};
    snprintf(rules[rule_count].function, sizeof rules->function, "%s", function);
    return &rules[rule_count++];
}

static void push_xid(int gpu, unsigned long long xid, int gi, int ci)
{
    for (int i = 0; i < MAX_SETS; i++)
        if (sets[i].used && sets[i].registered[gpu] && sets[i].count < MAX_EVENTS)
            sets[i].events[sets[i].count++] = (event_t){gpu, xid, (unsigned)gi, (unsigned)ci};
}

static int set_number(gpu_t *gpu, const char *name, double number)
{
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(numbers[i].name, name)) {
            *(double *)((char *)gpu + numbers[i].at) = number;
            return 1;
        }
    return 0;
}

static int one_gpu(gpu_t *gpu, const char *line)
{
    char word[64];
    unsigned id, pid;
    int code;
    double number;
    if (sscanf(line, "lose %*d %d", &code) == 1)
        gpu->lost = code;
    else if (sscanf(line, "loseinstance %*d %u %d", &id, &code) == 2 && id < MAX_INSTANCES)
        gpu->instance_lost[id] = code;
    else if (sscanf(line, "set %*d %63s %lf", word, &number) == 2)
        return set_number(gpu, word, number);
    else if (sscanf(line, "field %*d %u %lf", &id, &number) == 2 && id < MAX_FIELDS)
        set_field(gpu, id, number), gpu->energy_moves = id == 83 ? 0 : gpu->energy_moves;
    else if (sscanf(line, "narrow %*d %u %lf", &id, &number) == 2 && id < MAX_FIELDS)
        gpu->fields[id] = (field_t){1, SUCCESS, NARROW, number};
    else if (sscanf(line, "odd %*d %u %d", &id, &code) == 2 && id < MAX_FIELDS)
        gpu->fields[id] = (field_t){1, SUCCESS, code, 0};
    else if (sscanf(line, "nofield %*d %u %d", &id, &code) == 2 && id < MAX_FIELDS)
        gpu->fields[id] = (field_t){1, code, WIDE, 0};
    else if (sscanf(line, "activity %*d %u %lf", &id, &number) == 2 && id < MAX_ACTIVITIES)
        gpu->activities[id] = (activity_t){1, SUCCESS, number};
    else if (sscanf(line, "noactivity %*d %u %d", &id, &code) == 2 && id < MAX_ACTIVITIES)
        gpu->activities[id] = (activity_t){1, code, 0};
    else if (sscanf(line, "mig %*d %d", &code) == 1 && code <= MAX_INSTANCES)
        gpu->instance_count = code;
    else if (sscanf(line, "process %*d %15s %u %lf", word, &pid, &number) == 3
             && gpu->process_count < MAX_PROCESSES) {
        process_t *process = &gpu->processes[gpu->process_count++];
        snprintf(process->list, sizeof process->list, "%.15s", word);
        process->pid = pid;
        process->bytes = number < 0 ? UINT64_MAX : (unsigned long long)number;
    } else
        return 0;
    return 1;
}

static int every_gpu(const char *line)
{
    int gpu;
    if (sscanf(line, "%*s %d", &gpu) != 1 || gpu >= MAX_GPUS)
        return 0;
    int from = gpu < 0 ? 0 : gpu, until = gpu < 0 ? MAX_GPUS : gpu + 1, known = 1;
    for (int i = from; i < until; i++)
        known &= one_gpu(&gpus[i], line);
    return known;
}

static int understood(const char *line)
{
    int gpu, number, gi, ci;
    char function[64];
    if (sscanf(line, "gpus %d", &number) == 1 && number <= MAX_GPUS)
        reset(number);
    else if (sscanf(line, "driver %d", &number) == 1)
        driver_loaded = number;
    else if (sscanf(line, "version %31s", function) == 1)
        snprintf(version, sizeof version, "%.31s", function);
    else if (sscanf(line, "init %d", &number) == 1)
        init_code = number;
    else if (sscanf(line, "answer %d %63s %d", &gpu, function, &number) == 3)
        rule_for(gpu, function)->code = number;
    else if (sscanf(line, "slow %d %63s %d", &gpu, function, &number) == 3)
        rule_for(gpu, function)->slow_ms = number;
    else if (sscanf(line, "hold %63s", function) == 1)
        snprintf(held, sizeof held, "%s", function);
    else if (!strcmp(line, "release"))
        *held = 0;
    else if (sscanf(line, "xid %d %d %d %d", &gpu, &number, &gi, &ci) == 4 && gpu < MAX_GPUS)
        push_xid(gpu, (unsigned long long)number, gi, ci);
    else
        return every_gpu(line);
    return 1;
}

/* 0 for a line that was understood. */
int standin_do(const char *line)
{
    pthread_mutex_lock(&lock);
    int code = understood(line) ? 0 : -1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return code;
}
