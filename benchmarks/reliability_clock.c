/* Sets the clock of one process back: cc -shared -fPIC -o clock.so reliability_clock.c -ldl

   LD_PRELOAD=clock.so CLOCK_FILE=FILE COMMAND: the clock is back by as many seconds as FILE has bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

static long set_back(void) {
  struct stat file;
  const char *path = getenv("CLOCK_FILE");
  return path && !stat(path, &file) ? (long)file.st_size : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec -= set_back();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(now, zone);
  if (!result) now->tv_sec -= set_back();
  return result;
}

time_t time(time_t *now) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (now) *now = t.tv_sec;
  return t.tv_sec;
}
