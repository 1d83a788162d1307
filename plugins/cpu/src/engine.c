#define _GNU_SOURCE
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(STRATA_EMULATED) /* a test's library, with emulated instructions: see tests/emulated.h */
#define SUPPORTS(name) 1
#else
#define SUPPORTS(name) __builtin_cpu_supports(name)
#endif

#if defined(__x86_64__) && !defined(STRATA_WITHOUT_AMX)
/* Whether there are tiles and their products of bytes, and the system lets this process use them. */
static int amx(void) {
#if defined(STRATA_EMULATED)
    return 1;
#elif defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0; /* AMX-TILE, AMX-INT8 */
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
    return 0;
#endif
}
#endif

#if defined(__aarch64__)
/* Whether there are dot products of bytes. */
static int neondot(void) {
#if defined(__APPLE__)
    return 1;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 0;
#endif
}
#endif

static const Kernels *const *available(void) {
    static const Kernels *found[8];
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
              && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int vnni = avx512 && SUPPORTS("avx512vnni");
#if !defined(STRATA_WITHOUT_AMX)
    if (vnni && amx()) found[n++] = &kernels_amx;
#endif
    if (vnni) found[n++] = &kernels_avx512vnni;
    if (avx512) found[n++] = &kernels_avx512;
    if (avx2) found[n++] = &kernels_avx2;
#elif defined(__aarch64__)
    if (neondot()) found[n++] = &kernels_neondot;
    found[n++] = &kernels_neon;
#endif
    found[n++] = &kernels_portable;
    found[n] = NULL;
    return found;
}

int strata_abi(void) { return ABI_VERSION; }

const char *strata_isa(int i) {
    const Kernels *const *found = available();
    while (*found && i-- > 0) found++;
    return *found ? (*found)->name : NULL;
}

Engine *strata_open(int threads, const char *isa) {
    const Kernels *const *found = available();
    if (isa) while (*found && strcmp((*found)->name, isa)) found++;
    if (!*found || threads < 1) return NULL;
    Engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->kernels = *found;
    e->team = team_new(threads);
    if (e->team) return e;
    free(e);
    return NULL;
}

void strata_close(Engine *e) {
    team_free(e->team);
    for (int i = 0; i < BUFFERS; i++) free(e->buffer[i]);
    free(e);
}

const char *strata_engine_isa(const Engine *e) { return e->kernels->name; }

void *engine_buffer(Engine *e, enum Buffer which, size_t bytes) {
    if (e->bytes[which] < bytes || !e->buffer[which]) {
        free(e->buffer[which]);
        bytes = (bytes + 4095) / 4096 * 4096 + 4096;
        e->buffer[which] = aligned_alloc(64, bytes);
        e->bytes[which] = e->buffer[which] ? bytes : 0;
    }
    return e->buffer[which];
}

#if defined(__linux__)
void *strata_allocate(int64_t bytes) {
    /* Kernels ask for weights a little ahead of what they read; that never faults, so the end needs no slack. */
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE); /* half as many misses of the address cache; refused: as well */
    return memory;
}

void strata_release(void *memory, int64_t bytes) { munmap(memory, (size_t)bytes); }
#else
void *strata_allocate(int64_t bytes) {
    size_t size = ((size_t)bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, size);
    if (memory) memset(memory, 0, size);
    return memory;
}

void strata_release(void *memory, int64_t bytes) {
    (void)bytes;
    free(memory);
}
#endif
