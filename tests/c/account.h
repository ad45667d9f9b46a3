/* account.h - a provider of memory that keeps an account of what it was asked for, and checks each call against it. */
#ifndef ACCOUNT_H
#define ACCOUNT_H

#include "check.h"
#include "jemhooks_provider.h"

#define TENANTS 16
#define MAPPINGS 4096

typedef struct tenant_entry {
    long mappings;
    bool here;
} tenant_entry;

extern struct account {
    pthread_mutex_t lock;
    tenant_entry tenant[TENANTS];
    jemhooks_mapping live[MAPPINGS];
    void *owner[MAPPINGS];
    size_t count, bytes, bytes_peak, maps, unmaps, gives, entered, left, closed;
    size_t page;
    int fail_enter, fail_give_back; /* errno, 0: none */
    long fail_map;                  /* the Nth call from now on fails with ENOMEM; 0: none */
    bool has_tenants, reads_zero, overlaps;
    char *window;
} mine;

/* mine.lock held for the block that follows. */
#define LOCKED for (int once_ = !pthread_mutex_lock(&mine.lock); once_; once_ = pthread_mutex_unlock(&mine.lock))

void account_reset(void);
jemhooks_provider_ops account_ops(void); /* all of them, with tenants; `self` is &mine */
int account_map(void *self, void *tenant, size_t alignment, jemhooks_mapping *m);
int account_give_back(void *self, void *tenant, const jemhooks_mapping *m, size_t at, size_t length);
void account_end(void *self);
void account_tenant(const char *call, const void *tenant); /* is the one that it should be; mine.lock held */
jemhooks_provider *account_provider(const jemhooks_provider_ops *ops);

/* Closes the provider and checks that it has ended, left by its arenas and, unless memory was kept, with nothing mapped. */
void account_close(jemhooks_provider *provider, bool kept);

/* Blocks of many sizes, zeroed ones among them, written to and checked; all freed in the end. */
void account_work(jemhooks_arena *arena, long ops, uint64_t seed);

#endif
