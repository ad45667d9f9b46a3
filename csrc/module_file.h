/* module_file.h - finds loadable modules. */
#ifndef JH_MODULE_FILE_H
#define JH_MODULE_FILE_H

/* Loads "<folder of this library>/jemhooks/<name>.so", for good: the address of its symbol. NULL with errno, recorded. */
void *jh_module_symbol(const char *name, const char *symbol);

#endif
