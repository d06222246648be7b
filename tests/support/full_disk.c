/* A disk that becomes full: preloaded into a process (LD_PRELOAD), it counts the steps that take room in one folder, and
 * from a given one on lets them fail with ENOSPC, until there is room. Steps are what makes a file or a folder, writes,
 * syncs or moves. In the environment, DISK_FULL_FOLDER, DISK_FULL_STEP and DISK_FULL_SIGN fill it from the start, as long
 * as the file SIGN, which it makes, is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], sign[PATH_MAX];
static atomic_long steps, last = -1; /* counted; from which on it is full, -1: never */

/* Count from now on what happens in `path`; from step `from` on (1 is the first) the disk is full; -1: never. */
void disk_full(const char *path, long from) {
    snprintf(folder, sizeof folder, "%s", path);
    steps = 0;
    last = from;
}

long disk_steps(void) { return steps; }

__attribute__((constructor)) static void begin(void) {
    if (getenv("DISK_FULL_SIGN")) {
        snprintf(sign, sizeof sign, "%s", getenv("DISK_FULL_SIGN"));
        disk_full(getenv("DISK_FULL_FOLDER"), atol(getenv("DISK_FULL_STEP")));
    }
}

static int is_full(const char *path) {
    size_t length = strlen(folder);
    if (!length || strncmp(path, folder, length) || (path[length] != '/' && path[length]))
        return 0;
    long step = ++steps;
    if (last < 0 || step < last)
        return 0;
    if (sign[0]) {
        if (step == last)
            close(creat(sign, 0600));
        else if (access(sign, F_OK))
            return 0;
    }
    errno = ENOSPC;
    return 1;
}

static int is_full_at(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_full(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define AT_FD(type, name, parameters, ...) \
    type name parameters { return is_full_at(fd) ? -1 : REAL(name)(__VA_ARGS__); }
#define AT_PATH(type, name, parameters, path, ...) \
    type name parameters { return is_full(path) ? -1 : REAL(name)(__VA_ARGS__); }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return (flags & O_CREAT) && access(path, F_OK) && is_full(path) ? -1 : REAL(name)(path, flags, mode); \
    }

AT_FD(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
AT_FD(ssize_t, writev, (int fd, const struct iovec *parts, int count), fd, parts, count)
AT_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
AT_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
AT_FD(int, fsync, (int fd), fd)
AT_FD(int, fdatasync, (int fd), fd)
AT_PATH(int, rename, (const char *from, const char *to), to, from, to)
AT_PATH(int, renameat, (int a, const char *from, int b, const char *to), to, a, from, b, to)
AT_PATH(int, mkdir, (const char *path, mode_t mode), path, path, mode)
OPEN(open)
OPEN(open64)
