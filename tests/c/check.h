/* check.h - what the test programs share: options, violated invariants, random numbers, byte patterns, and what the
 * kernel and the library say about themselves.
 *
 * A program runs its cases (all, or the one named by case=…), prints a line for each violated invariant, beginning with
 * its reason, then one line of figures, and exits 0, or 1 if anything was violated.
 * Everything here may be called from any thread.                                                                     */
#ifndef CHECK_H
#define CHECK_H

#include "jemhooks.h"
#include "jemhooks_null.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ((size_t)4096)
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define SLOT (2 * MIB)

/* ---- programs, cases, options ------------------------------------------------------------------------------------ */

typedef struct test_case {
    const char *name;
    void (*run)(void);
} test_case;

void take_options(int argc, char **argv);
/* Runs the cases, up to one with a NULL name; the exit status. */
int run_cases(const test_case *cases);
/* name=value from the command line, or the default. */
long option(const char *name, long otherwise);
const char *option_text(const char *name, const char *otherwise);
/* A number for the closing line of figures. */
void figure(const char *name, double value);

/* Notes a violated invariant; the first few of each reason are printed. */
void violated(const char *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What must hold. Gives whether it does. */
#define CHECK(reason, condition, ...) ((condition) ? true : (violated(reason, __VA_ARGS__), false))
bool anything_violated(void);
/* The result of a call that must succeed; ends the program where nothing can be tested without it. */
#define MUST(call) must((call), #call, __FILE__, __LINE__)
void must(int rc, const char *call, const char *file, int line);
void *must_have(void *p, const char *what);

/* ---- random numbers and patterns --------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t state;
} dice;
uint64_t roll(dice *d);
/* 0 to n - 1 */
size_t roll_below(dice *d, size_t n);

/* Writes a pattern of nonzero words that depends on tag: everywhere in small blocks, each 1,024 bytes in large ones. */
void fill(void *p, size_t size, uint64_t tag);
/* Are the first `keep` bytes of a block that was filled with `size` still there? */
bool filled(const void *p, size_t size, size_t keep, uint64_t tag);
bool all_zero(const void *p, size_t size);

/* ---- the kernel's view ------------------------------------------------------------------------------------------- */

/* KiB of a line of /proc/self/status, e.g. "VmPin". */
long status_kib(const char *line);
/* Checks that just `bytes` are pinned; patient with kernels before 6.4, which unpin up to a second later. */
void check_pinned(const char *when, size_t bytes);
/* Mappings and open files of this process. */
long count_mappings(void);
long count_files(void);
/* How many of the pages are in memory. */
size_t resident_pages(const void *base, size_t length);
/* Is the address mapped at all? */
bool is_mapped(const void *address);
/* `length` bytes of anonymous memory on 2 MiB. */
void *map_aligned(size_t length, int protection);
/* Forks and runs the function in the child, which ends with _exit(); checks that it violated nothing, did not crash and
 * did not hang for a minute. */
void in_child(const char *what, void (*run)(void));

/* ---- the library's view ------------------------------------------------------------------------------------------ */

/* Is the jemalloc in use at least this one? Builds without a number count as the newest. */
bool jemalloc_at_least(int major, int minor);
/* Bytes of jemalloc 4's records at the start of each 2 MiB, which count as free and yet are in use; 0 for others. */
size_t records(void);
/* The next bytes of [*at, stop) in which there are none, so that a peer may write there: their length; *at moves to where they
 * begin. 0: there are no more. */
size_t beside_records(uintptr_t *at, uintptr_t stop);
jemhooks_registrar *null_open(const jemhooks_null_config *config);
jemhooks_null_stats null_stats(jemhooks_registrar *registrar);
jemhooks_stats stats_of(jemhooks_arena *arena);
/* All regions, in an array the caller frees. */
jemhooks_region_info *regions_of(jemhooks_arena *arena, size_t *count);
/* The region of p, which must be of this arena. */
jemhooks_region_info region_at(jemhooks_arena *arena, const void *p);
jemhooks_arena *arena_of(const jemhooks_config *config);
/* An arena with these registrars (NULL: policy none), lazy, that gives free pages up at once. */
jemhooks_arena *arena_on(jemhooks_provider *provider, jemhooks_registrar *const *registrars, unsigned count);
/* Destroys it, which must succeed. */
void arena_end(jemhooks_arena *arena);
jemhooks_provider *fixed_range(void *base, size_t length, bool host_accessible, bool zeroed);
/* Checks what must hold of every arena while no one uses it: the account of pages, where regions begin, how long they
 * are (a longer one than region_max only up to largest_block), and sums. Adds the registered regions to *registered. */
void check_arena(jemhooks_arena *arena, size_t region_max, size_t largest_block, size_t *registered);
/* Checks that all regions are idle and unregistered and, if asked, that none of their pages is in memory. */
void check_idle(jemhooks_arena *arena, bool pages_too);

/* ---- threads ----------------------------------------------------------------------------------------------------- */

pthread_t start_thread(void *(*run)(void *), void *arg);
void join_thread(pthread_t thread);

#endif
