/* module_file.h - finds loadable modules. */
#ifndef JH_MODULE_FILE_H
#define JH_MODULE_FILE_H

/* Loads "<folder of this library>/jemhooks/<what>_<kind>.so", for good: the address of its symbol. NULL with errno, recorded. */
void *jh_module_symbol(const char *what, const char *kind, const char *symbol);

#endif
