/* The system's permission to use tiles. */
#define _GNU_SOURCE
#include "amx.h"

#include <sys/syscall.h>
#include <unistd.h>

static int is_used;

int tm_has_amx(void) { return is_used; }

#ifdef TM_AMX
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int tm_use_amx(int is_wanted) {
    is_used = is_wanted && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_used;
}
#else
int tm_use_amx(int is_wanted) {
    (void)is_wanted;
    return 0;
}
#endif
