/* memlock.h - what a registrar that pins says when memory is refused. No state. */
#ifndef JEMHOOKS_MEMLOCK_H
#define JEMHOOKS_MEMLOCK_H

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* The number after `key` in a file of /proc, or -1. */
static inline long long proc_value(const char *path, const char *key) {
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    char line[256];
    long long value = -1;
    while (value < 0 && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) sscanf(line + strlen(key), "%lld", &value);
    fclose(f);
    return value;
}

/* "RLIMIT_MEMLOCK is … bytes and this process has … kB pinned"; returns `text`. */
static inline const char *memlock_text(char *text, size_t size) {
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    char bytes[32] = "unlimited";
    if (limit.rlim_cur != RLIM_INFINITY) snprintf(bytes, sizeof bytes, "%llu bytes", (unsigned long long)limit.rlim_cur);
    snprintf(text, size, "RLIMIT_MEMLOCK is %s and this process has %lld kB pinned", bytes,
             proc_value("/proc/self/status", "VmPin:"));
    return text;
}

#endif
