/* A disk that fails on command, for a process started with LD_PRELOAD and FAULTS.
 *
 * FAULTS holds rules "call:path:nth:what", separated by spaces. `call` is sync (fsync and fdatasync), rename, renameat2, unlink, pwrite (pwritev2, which Python calls) or opendir;
 * `path` is a part of the file's path, its end where it closes with $, or *; `nth` says which matching call fails (0: every one; -3: the
 * third after one was held). `what` is the number of an errno, "lose" and such a number (a sync that fails and has lost the file's bytes,
 * as a server out of quota does), KILL (the process dies before the call), DIE (after it), "sleep" and milliseconds, or "hold": the call
 * adds a byte to the file that HELD names, and goes on once somebody has removed that, or after five minutes. A process and those that it forks
 * count together and die together: the one that was started is killed, and what its workers do then is theirs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/types.h>
#include <unistd.h>

static struct { atomic_int seen[16], has_held; pid_t started; } *shared;

__attribute__((constructor)) static void start(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared->started = getpid();
}

static void die(void) {
    kill(shared->started, SIGKILL);
    for (int i = 0; i < 5000; i++) usleep(2000); /* until the system ends this one too */
    abort();
}

static void hold(void) {
    const char *held = getenv("HELD");
    int made = held ? open(held, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (made < 0) return;
    if (write(made, ".", 1) != 1) abort();
    close(made);
    atomic_store(&shared->has_held, 1);
    for (int i = 0; i < 150000 && !access(held, F_OK); i++) usleep(2000);
}

/* The fault of this call: 0 none, an errno, or -1 to die after it. Sleeps, dies and loses bytes here. */
static int fault(const char *call, const char *path, int fd) {
    const char *faults = getenv("FAULTS");
    if (!faults) return 0;
    char copy[4096], *save = NULL;
    strncpy(copy, faults, sizeof copy - 1);
    copy[sizeof copy - 1] = 0;
    int index = 0;
    for (char *rule = strtok_r(copy, " ", &save); rule && index < 16; rule = strtok_r(NULL, " ", &save), index++) {
        char name[32], part[512], what[32];
        int nth;
        if (sscanf(rule, "%31[^:]:%511[^:]:%d:%31s", name, part, &nth, what) != 4) continue;
        size_t n = strlen(part), length = strlen(path);
        int ends = part[n - 1] == '$' && length >= n - 1 && !strncmp(path + length - (n - 1), part, n - 1);
        if (strcmp(name, call) || (strcmp(part, "*") && !strstr(path, part) && !ends)) continue;
        if (nth < 0 && !atomic_load(&shared->has_held)) continue;
        int now = atomic_fetch_add(&shared->seen[index], 1) + 1;
        if (nth && now != abs(nth)) continue;
        if (!strncmp(what, "sleep", 5)) { usleep(1000 * atoi(what + 5)); continue; }
        if (!strcmp(what, "hold")) { hold(); continue; }
        if (!strcmp(what, "KILL")) die();
        if (!strcmp(what, "DIE")) return -1;
        if (!strncmp(what, "lose", 4)) {
            struct stat status;
            if (!fstat(fd, &status)) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, status.st_size);
            return atoi(what + 4);
        }
        return atoi(what);
    }
    return 0;
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, buffer, size - 1);
    buffer[n < 0 ? 0 : n] = 0;
    return buffer;
}

#define REAL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define ACT(f, real) do { int found = (f); if (found > 0) { errno = found; return -1; } \
    int result = (real); if (found < 0) die(); return result; } while (0)

int fsync(int fd) { char b[4096]; ACT(fault("sync", path_of(fd, b, sizeof b), fd), REAL("fsync", int)(fd)); }
int fdatasync(int fd) { char b[4096]; ACT(fault("sync", path_of(fd, b, sizeof b), fd), REAL("fdatasync", int)(fd)); }
int rename(const char *a, const char *b) { ACT(fault("rename", b, -1), REAL("rename", const char *, const char *)(a, b)); }
int renameat2(int d, const char *a, int e, const char *b, unsigned flags) {
    ACT(fault("renameat2", b, -1), REAL("renameat2", int, const char *, int, const char *, unsigned)(d, a, e, b, flags));
}
int unlink(const char *path) { ACT(fault("unlink", path, -1), REAL("unlink", const char *)(path)); }
static int opened(const char *name, const char *path, int flags, mode_t mode) {
    int found = flags & O_DIRECTORY ? fault("opendir", path, -1) : 0;
    if (found > 0) { errno = found; return -1; }
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, name))(path, flags, mode);
}
int open(const char *path, int flags, ...) { va_list l; va_start(l, flags); mode_t m = va_arg(l, mode_t); va_end(l); return opened("open", path, flags, m); }
int open64(const char *path, int flags, ...) { va_list l; va_start(l, flags); mode_t m = va_arg(l, mode_t); va_end(l); return opened("open64", path, flags, m); }
static ssize_t written(const char *name, int fd, const struct iovec *data, int n, off_t at, int flags) {
    char b[4096];
    int found = fault("pwrite", path_of(fd, b, sizeof b), fd);
    if (found > 0) { errno = found; return -1; }
    ssize_t result = ((ssize_t (*)(int, const struct iovec *, int, off_t, int))dlsym(RTLD_NEXT, name))(fd, data, n, at, flags);
    if (found < 0) die();
    return result;
}
ssize_t pwritev2(int fd, const struct iovec *data, int n, off_t at, int flags) { return written("pwritev2", fd, data, n, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *data, int n, off_t at, int flags) { return written("pwritev64v2", fd, data, n, at, flags); }
