/* module_file.h - finds loadable modules, and the file of a function. */
#ifndef JH_MODULE_FILE_H
#define JH_MODULE_FILE_H

/* Loads "<folder of this library>/jemhooks/<what>_<kind>.so", for good: the address of its symbol. NULL with errno, recorded. */
void *jh_module_symbol(const char *what, const char *kind, const char *symbol);
/* The file that a function is in; NULL: not known, or it is an entry that the program has for another file's function. */
const char *jh_file_of(const void *function);

#endif
