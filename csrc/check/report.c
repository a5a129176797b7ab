// The report of a run, as JSON, and the record of what every role did.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "check/engine.h"

enum { MAX_EVENTS = 1 << 18, LAST = 8 };
static ck_event *events, *kept;
static int event_count, kept_count, place = -1;
static const char *const rules[CK_RULES] = {
    "uninitialised", "race",  "overwrite",   "fence", "fence-read", "in-flight", "unnamed",
    "mma-fence",     "count", "bytes",       "exit",  "barrier",    "deadlock",  "bounds",
    "lifetime",      "init",  "global-race", "crash", "elected",    "phase",     "grid"};

bool rule_on(enum ck_rule rule) { return !(ck.request->rules_off >> rule & 1); }
static const semaphore *place_sem;
static bool last_wait;                     // place_sem is what the fiber waited for last, not what the report is about
void report_place(int offset) {
  place = offset;
  place_sem = NULL;
  last_wait = false;
}
void report_last_wait(void) {
  place_sem = self()->last_sem;
  last_wait = true;
}
void report_sem(const semaphore *s) {
  report_place(offset_in_block(s->at));
  place_sem = s;
}

void events_reset(void) {
  if (!events) events = malloc(MAX_EVENTS * sizeof *events);
  event_count = 0;
  place = -1;
}
void event_add(const void *pc, enum ck_op op, const void *at, int value) {
  if (!events || event_count == MAX_EVENTS) return;
  events[event_count++] = (ck_event){pc, (int)op, ck.current, at ? block_of(at) : -1, offset_in_block(at), value};
}
int ck_events(ck_event *to, int most) {
  if (to) memcpy(to, events, (size_t)(event_count < most ? event_count : most) * sizeof *to);
  return event_count;
}
void events_keep(void) {
  ck_event *spare = kept;
  kept = events;
  kept_count = event_count;
  events = spare;
}
static bool is_sync(int op) { return op < CK_OP_LOAD && op != CK_OP_INIT; }
const ck_event *event_of(int fiber, int index) {
  for (int i = 0; i < kept_count; i++)
    if (kept[i].fiber == fiber && is_sync(kept[i].op) && index-- == 0) return &kept[i];
  return NULL;
}

// ---- JSON
static size_t used;
__attribute__((format(printf, 1, 2))) static void put(const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (used < ck.text_size) {
    int n = vsnprintf(ck.text + used, ck.text_size - used, format, args);
    used += n > 0 ? (size_t)n : 0;
  }
  va_end(args);
}
static void put_string(const char *s) {
  put("\"");
  for (; *s; s++)
    if (*s == '\n') put("\\n");
    else put(*s == '"' || *s == '\\' ? "\\%c" : "%c", *s);
  put("\"");
}
static void put_fiber(int number) {
  const fiber *f = &ck.fiber[number];
  put("{\"block\": %d, \"rank\": %d, \"role\": %d, \"member\": %d, \"events\": [", f->block, f->rank, f->role->role,
      f->role->index);
  int shown[LAST], n = 0;
  for (int i = event_count - 1; i >= 0 && n < LAST; i--)
    if (events[i].fiber == number) shown[n++] = i;
  for (int i = n - 1; i >= 0; i--) {
    const ck_event *e = &events[shown[i]];
    put("%s[%d, %llu, %d, %d]", i == n - 1 ? "" : ", ", e->op, (unsigned long long)(uintptr_t)e->pc, e->offset,
        e->value);
  }
  put("]}");
}

void report(enum ck_rule rule, const void *pc, const void *other_pc, int other_fiber, const char *format, ...) {
  if (ck.failed) return;
  ck.failed = true;
  char text[2600];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  used = 0;
  put("{\"rule\": \"%s\", \"text\": ", rules[rule]);
  put_string(text);
  put(", \"seed\": %llu, \"step\": %ld, \"place\": %d, \"pc\": %llu, \"other_pc\": %llu, \"fibers_per_block\": %d",
      (unsigned long long)ck.request->seed, ck.steps, place, (unsigned long long)(uintptr_t)pc,
      (unsigned long long)(uintptr_t)other_pc, ck.kernel->fibers);
  if (ck.current >= 0) {
    put(", \"fiber\": ");
    put_fiber(ck.current);
  }
  if (other_fiber >= 0 && other_fiber != ck.current) {
    put(", \"other_fiber\": ");
    put_fiber(other_fiber);
  }
  if (place_sem) {
    put(", \"semaphore\": {\"place\": %d, \"last_wait\": %s, \"count\": %d, \"phases\": [",
        offset_in_block(place_sem->at), last_wait ? "true" : "false", place_sem->count);
    for (int phase = place_sem->completed > 0 ? place_sem->completed - 1 : 0; phase <= place_sem->completed; phase++) {
      put("%s[%d", phase < place_sem->completed || place_sem->completed == 0 ? "" : ", ", phase);
      for (int i = 0; i < place_sem->arrivals[phase & 1]; i++) {
        const arrival *a = &place_sem->arrival[phase & 1][i];
        put(", [%d, %d, %llu]", a->fiber, a->warps, (unsigned long long)(uintptr_t)a->pc);
      }
      put("]");
    }
    put("]}");
  }
  if (ck.crash_frames) {
    put(", \"stack\": [");
    for (int i = 0; i < ck.crash_frames; i++)
      put("%s%llu", i ? ", " : "", (unsigned long long)(uintptr_t)ck.crash_frame[i]);
    put("]");
  }
  put(", \"roles\": [");
  for (int i = 0; i < ck.fibers; i++)
    put("%s[%d, %d, %d]", i ? ", " : "", ck.fiber[i].block, ck.kernel->role[i % ck.kernel->fibers].role,
        ck.kernel->role[i % ck.kernel->fibers].index);
  put("]}");
  while (ck.in_fiber) fiber_yield();   // does not come back: after a report nothing of the run goes on
}
