/* Shared by the files of the stand-in: its GPUs, and the entry of every call. */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 16, MAX_INSTANCES = 7, MAX_FIELDS = 308, MAX_ACTIVITIES = 477, MAX_PROCESSES = 64,
       MAX_RULES = 64, MAX_COUNTED = 80, MAX_EVENTS = 64, MAX_SETS = 8 };
#define ALL_LINKS 0xFFFFFFFFu
#define NO_INSTANCE 0xFFFFFFFFu
#define XID_EVENT 0x8ull
/* Of nvmlValueType_t. */
#define NARROW 1
#define WIDE 3
#ifdef OLD_DRIVER
#define DRIVER_VERSION "525.147.05"
#else
#define DRIVER_VERSION "580.82.07"
#endif

typedef struct { int known, code, type; double number; } field_t;
typedef struct { int known, code; double percent; } activity_t;
typedef struct { char list[16]; unsigned pid; unsigned long long bytes; } process_t;
typedef struct gpu gpu_t;
/* What a handle points at: a GPU, or an instance of one. */
typedef struct { gpu_t *gpu; int instance; } device_t;

struct gpu {
    device_t self, instances[MAX_INSTANCES];
    int index, lost, instance_count, instance_lost[MAX_INSTANCES];
    double memory_total, memory_reserved, memory_used, utilization, memory_busy, sm_clock,
        memory_clock, sm_clock_max, memory_clock_max, throttle, throttle_known, temperature, power,
        power_limit, persistence, events, gpm, energy_moves;
    field_t fields[MAX_FIELDS];
    activity_t activities[MAX_ACTIVITIES];
    process_t processes[MAX_PROCESSES];
    int process_count;
};

typedef struct { int gpu, code, slow_ms; char function[64]; } rule_t;
typedef struct { int gpu; unsigned long long xid; unsigned gi, ci; } event_t;
typedef struct { int used, registered[MAX_GPUS]; event_t events[MAX_EVENTS]; int count; } set_t;

/* Held while any of the following is touched. */
extern pthread_mutex_t lock;
/* Told at each change of it. */
extern pthread_cond_t changed;
extern gpu_t gpus[MAX_GPUS];
extern int gpu_count, initialised, driver_loaded, init_code;
extern rule_t rules[MAX_RULES];
extern int rule_count;
extern char held[64], version[32];
extern set_t sets[MAX_SETS];

/* Since the library was loaded. */
double seconds(void);
/* 0 for a line that was understood. */
int standin_do(const char *line);
/* Obey the lines of STANDIN_SCRIPT, before anything is asked. */
void obey_script(void);
/* Obey the lines of the pipe that STANDIN_PIPE names, if it names one. */
void obey_pipe(void);
/* Put GPUs back to idle and forget all rules and counts. */
void reset(int count);
void set_field(gpu_t *gpu, unsigned id, double number);
void forget_counts(void);
void count_call(const char *function);
/* What the rules say that a call returns, for a GPU's index or -1. */
int ruled(const char *function, int gpu, int *slow_ms);
/* Count a call, wait where it is held or slow, and give its return code. */
int enter(const char *function, const device_t *device);

#define ENTER(device)                                                                              \
    do {                                                                                           \
        int code_ = enter(__func__, device);                                                       \
        if (code_)                                                                                 \
            return code_;                                                                          \
    } while (0)
/* The values of a whole GPU only. */
#define ENTER_WHOLE(device)                                                                        \
    do {                                                                                           \
        ENTER(device);                                                                             \
        if ((device)->instance >= 0)                                                               \
            return NOT_SUPPORTED;                                                                  \
    } while (0)

#endif
