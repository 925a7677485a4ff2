/* The functions of IOKit and CoreFoundation that worker_mac/sleeps.py calls, with Apple's signatures: a run loop that
   tells of one sleep, and a record of what was answered. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

typedef uint32_t io_object_t;
typedef void (*callback_t)(void *refcon, io_object_t service, uint32_t type, void *argument);

const void *kCFRunLoopDefaultMode = (const void *)0x7ffe00000001;
static callback_t callback;
static volatile int stopped;
char answers[4096];
static int used;

#define SAY(...) (used += snprintf(answers + used, sizeof answers - used, __VA_ARGS__))

io_object_t IORegisterForSystemPower(void *refcon, void **port, callback_t given, io_object_t *notifier) {
  callback = given;
  *port = (void *)0x7ffe00000002;
  *notifier = 0xf0000003;
  return refcon == 0 ? 0xf0000004 : 0;
}
void *IONotificationPortGetRunLoopSource(void *port) { return port == (void *)0x7ffe00000002 ? (void *)0x7ffe00000005 : 0; }
int IOAllowPowerChange(io_object_t root, intptr_t argument) { SAY("allow %x %lx;", root, (long)argument); return 0; }
int IODeregisterForSystemPower(io_object_t *notifier) { SAY("gone %x;", *notifier); return 0; }
void *CFRunLoopGetCurrent(void) { return (void *)0x7ffe00000006; }
void CFRunLoopAddSource(void *loop, void *source, const void *mode) {
  SAY("source %d;", loop == (void *)0x7ffe00000006 && source == (void *)0x7ffe00000005 && mode == kCFRunLoopDefaultMode);
}
void CFRunLoopStop(void *loop) { stopped = loop == (void *)0x7ffe00000006; }
void CFRunLoopRun(void) {
  callback(0, 1, 0xE0000270u, (void *)0x123456789a);
  callback(0, 1, 0xE0000280u, (void *)0x123456789b);
  callback(0, 1, 0xE0000320u, 0);
  callback(0, 1, 0xE0000300u, 0);
  while (!stopped) usleep(1000);
}
