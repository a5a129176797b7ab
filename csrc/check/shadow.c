// Shadow of shared memory: per cell the last write and the reads since. And shadow of global memory, for what kernels
// exchange through it.
//
// Rules, for an access by a fiber that has seen clock `seen` and fenced `fenced`:
//   a read sees the last write;                                  a write sees the last write and all reads since it
//   an asynchronous access also has the fence of a generic write it follows; an asynchronous write also that of generic
//       reads (strict)
//   inside a warpgroup, other threads' accesses are known after wg_sync or a named barrier: the elected thread stands
//       for them
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "check/engine.h"

// Tiles and vectors have cells of 32 bytes, which no window cuts; scalars, and only they, cells of 4. One element of a
// vector is in its tile cell.
enum { TILE_CELL = 32, WORD_CELL = 4, READERS = 7 };
typedef struct touch { uint16_t who, pc; uint32_t value : 29, generic : 1, own : 1, used : 1; } touch;
typedef struct cell { touch write, read[READERS]; } cell;

static cell *tiles, *words;
static size_t capacity, used_bytes;

// A run looks at few of the words, which take 16 times the bytes of shared memory: only what was looked at is cleared.
enum { CHUNK = 64 };
static uint8_t *words_used;                      // by CHUNK words
static size_t chunks(size_t bytes) { return bytes / WORD_CELL / CHUNK + 1; }

// Addresses of code as small numbers.
enum { PCS = 1 << 14 };
static const void *pcs[PCS];
static uint16_t pc_number(const void *pc) {
  uint32_t i = (uint32_t)((uintptr_t)pc * 2654435761u) % PCS;
  while (pcs[i] && pcs[i] != pc) i = (i + 1) % PCS;
  pcs[i] = pc;
  return (uint16_t)i;
}

bool shadow_open(size_t bytes) {
  if (bytes > capacity) {
    free(tiles);
    free(words);
    free(words_used);
    tiles = calloc(bytes / TILE_CELL + 1, sizeof *tiles);
    words = calloc(chunks(bytes) * CHUNK, sizeof *words);
    words_used = calloc(chunks(bytes), sizeof *words_used);
    capacity = tiles && words && words_used ? bytes : 0;
  }
  used_bytes = bytes;
  return bytes <= capacity;
}

// ---- global memory, by words of 4 bytes. Large accesses look at one word of each line of 64 bytes. So a region has a
// plane for each place in a line, and planes are taken when they are first touched.
enum { LINE = 64, LINES = 256, PLACES = LINE / WORD_CELL, REGIONS = 1 << 12,
      TABLE = 2 * REGIONS, PLANES = 1 << 13, GLOBAL_READERS = 3 };
typedef struct global_word { touch write, read[GLOBAL_READERS]; } global_word;
typedef struct plane { global_word word[LINES]; uint8_t kind[LINES]; } plane;
// plane, here and in the table: 1 + index, 0: none
typedef struct region { uintptr_t number; uint16_t plane[PLACES]; } region;
static plane *planes;
static region regions[REGIONS];
static uint16_t table[TABLE];
static int plane_count, region_count;

void shadow_reset(void) {
  memset(tiles, 0, (used_bytes / TILE_CELL + 1) * sizeof *tiles);
  for (size_t i = 0; i < chunks(capacity); i++) {
    if (!words_used[i]) continue;
    memset(words + i * CHUNK, 0, CHUNK * sizeof *words);
    words_used[i] = 0;
  }
  if (plane_count) memset(planes, 0, (size_t)plane_count * sizeof *planes);
  if (region_count) memset(table, 0, sizeof table);
  plane_count = region_count = 0;
}

static int fiber_of(int who) { return who < PER_FIBER * ck.fibers ? who / PER_FIBER : -1; }

static const char *kind_of(touch t) {
  if (fiber_of(t.who) < 0) return "a copy into shared memory";
  switch (t.who % PER_FIBER) {
  case PRODUCTS_A:
  case PRODUCTS: return "a matrix product";
  case STORES: return "a store from shared memory";
  default: return t.generic ? "an access through registers" : "an asynchronous access";
  }
}

// Does the clock pair of the accessing threads know of t? For a warpgroup its elected thread has to know too. It knows
// what others did after a sync.
static bool knows(const fiber *f, touch t, int flags) {
  if (flags & ACCESS_LEADER) return f->leader_seen[t.who] >= (int)t.value;
  if (f->seen[t.who] < (int)t.value) return false;
  if ((flags & ACCESS_OWN) && t.own && fiber_of(t.who) == ck.current) return true;
  return !f->group || f->leader_seen[t.who] >= (int)t.value;
}
static bool fence_covers(const fiber *f, touch t, int flags) {
  if (flags & ACCESS_LEADER) return f->leader_fenced[t.who] >= (int)t.value;
  return f->fenced[t.who] >= (int)t.value && (!f->group || f->leader_fenced[t.who] >= (int)t.value);
}

// copies: an asynchronous write; again: a write over an own one.
static const char *missing(const fiber *f, touch t, bool copies, bool again) {
  static char text[240];
  const int other = fiber_of(t.who);
  if (other < 0) {
    const semaphore *s = &ck.sem[t.who - PER_FIBER * ck.fibers];
    snprintf(
        text, sizeof text,
        copies ?
            "nothing that follows phase %d of {s:%d} of block %d, such as a release by its readers, is known here" :
            "no wait for phase %d of {s:%d} of block %d",
        (int)t.value - 1, offset_in_block(s->at), s->block);
  } else if (t.who % PER_FIBER == PRODUCTS)
    snprintf(text, sizeof text, "no mma_wait for that product%s",
             &ck.fiber[other] == f ? "" : " that reaches this role");
  else if (t.who % PER_FIBER == STORES)
    snprintf(text, sizeof text, "no tma_store_wait_read for that store that the accessing threads know of");
  else if (&ck.fiber[other] == f)
    snprintf(text, sizeof text, "no wg_sync between two accesses of the warpgroup's threads%s",
             again ? ", or an acquire of this stage is missing" : "");
  else {
    snprintf(text, sizeof text, "no arrival of {f:%d} after that access has been waited for here", other);
    report_last_wait();
  }
  return text;
}

static bool overwrites(const void *pc, touch t, enum ck_rule rule, bool async) {
  const char *why = missing(self(), t, async, false);
  report(rule, pc, pcs[t.pc], fiber_of(t.who), "overwrites what %s may still read: %s", kind_of(t), why);
  return false;
}
static bool check_cell(const void *pc, const cell *c, int flags, size_t offset) {
  const fiber *f = self();
  const bool async = flags & ACCESS_ASYNC, write = flags & ACCESS_WRITE;
  report_place((int)offset);
  if (!c->write.used) {
    if (write || !rule_on(CK_UNINITIALISED)) return true;
    report(CK_UNINITIALISED, pc, NULL, -1, "reads shared memory that nothing has written");
    return false;
  }
  // Another role that still reads comes first. A role whose acquire or wait for it is missing mostly finds its own
  // earlier write there, too.
  for (int i = 0; write && i < READERS && c->read[i].used; i++)
    if (fiber_of(c->read[i].who) != ck.current && !knows(f, c->read[i], flags) && rule_on(CK_OVERWRITE))
      return overwrites(pc, c->read[i], CK_OVERWRITE, async);
  if (!knows(f, c->write, flags) &&
      rule_on(fiber_of(c->write.who) == ck.current && c->write.generic ? CK_ELECTED : CK_RACE)) {
    report(fiber_of(c->write.who) == ck.current && c->write.generic ? CK_ELECTED : CK_RACE, pc, pcs[c->write.pc],
           fiber_of(c->write.who), "%s what %s may still write: %s", write ? "overwrites" : "reads", kind_of(c->write),
           missing(f, c->write, async && write, write));
    return false;
  }
  if (async && c->write.generic && !fence_covers(f, c->write, flags) && rule_on(CK_FENCE)) {
    report(CK_FENCE, pc, pcs[c->write.pc], fiber_of(c->write.who),
           "asynchronous access to what was written through registers: no fence_async by the writer, "
           "before the synchronisation that leads here");
    return false;
  }
  for (int i = 0; write && i < READERS && c->read[i].used; i++) {
    const touch t = c->read[i];
    const enum ck_rule rule = fiber_of(t.who) == ck.current && t.generic ? CK_ELECTED : CK_OVERWRITE;
    if (!knows(f, t, flags) && rule_on(rule)) return overwrites(pc, t, rule, async);
    if (async && t.generic && !fence_covers(f, t, flags) && rule_on(CK_FENCE_READ)) {
      report(CK_FENCE_READ, pc, pcs[t.pc], fiber_of(t.who),
             "asynchronous write over what was read through registers: no fence_async by the reader, "
             "before the synchronisation that leads here");
      return false;
    }
  }
  return true;
}

static void note(cell *c, touch t, bool write) {
  if (write) {
    *c = (cell){.write = t};
    return;
  }
  for (int i = 0; i < READERS; i++)
    if (!c->read[i].used || c->read[i].who == t.who || i == READERS - 1) {
      if (!c->read[i].used || c->read[i].value <= t.value) c->read[i] = t;
      return;
    }
}

static bool access_cells(const void *pc, cell *cells, size_t size, size_t begin, size_t end, int flags, touch t) {
  const size_t block = begin - begin % ck.kernel->stride;
  for (size_t i = begin / size; i <= (end - 1) / size; i++) {
    if (!check_cell(pc, &cells[i], flags, i * size - block)) return false;
    note(&cells[i], t, flags & ACCESS_WRITE);
  }
  return true;
}

bool shadow_access(const void *pc, const ck_region *r, int flags, int who, int value) {
  const touch t = {.who = (uint16_t)who, .pc = pc_number(pc), .value = (uint32_t)value & 0x1fffffff,
                   .generic = !(flags & ACCESS_ASYNC), .own = (flags & ACCESS_OWN) != 0, .used = 1};
  const size_t first = (size_t)((const char *)r->p - ck.shared);
  for (int row = 0; row < r->rows; row++) {
    const size_t begin = first + (size_t)row * (size_t)r->pitch, end = begin + (size_t)r->bytes;
    if ((const char *)r->p < ck.shared || end > ck.shared_bytes ||
        begin / ck.kernel->stride != (end - 1) / ck.kernel->stride ||
        (end - 1) % ck.kernel->stride >= ck.kernel->shared_bytes) {
      report(CK_BOUNDS, pc, NULL, -1, "accesses %d bytes that are not in a block's shared memory", r->bytes);
      return false;
    }
    const bool tile = (r->bytes | (int)begin) % TILE_CELL == 0 || tiles[begin / TILE_CELL].write.used;
    for (size_t i = begin / WORD_CELL / CHUNK; !tile && i <= (end - 1) / WORD_CELL / CHUNK; i++) words_used[i] = 1;
    if (!access_cells(pc, tile ? tiles : words, tile ? TILE_CELL : WORD_CELL, begin, end, flags, t)) return false;
  }
  report_place(-1);
  return true;
}

// NULL where there are too many, here and below.
static region *region_of(uintptr_t number) {
  size_t i = number * 2654435761u % TABLE;
  while (table[i] && regions[table[i] - 1].number != number) i = (i + 1) % TABLE;
  if (!table[i] && region_count < REGIONS) {
    regions[region_count] = (region){.number = number};
    table[i] = (uint16_t)++region_count;
  }
  return table[i] ? &regions[table[i] - 1] : NULL;
}
static plane *plane_of(region *r, uintptr_t at) {
  uint16_t *plane = &r->plane[at % LINE / WORD_CELL];
  if (!*plane && plane_count < PLANES) *plane = (uint16_t)++plane_count;
  return *plane ? &planes[*plane - 1] : NULL;
}

// `seen` knows of accesses through registers. Only the elected thread knows what its stores have written, until it
// tells.
static bool unordered(const fiber *f, touch t) {
  return t.used && fiber_of(t.who) != ck.current && f->seen[t.who] < (int)t.value &&
         f->leader_seen[t.who] < (int)t.value;
}
static bool global_race(const void *pc, touch t, const char *does, const char *did, const char *more) {
  if (!rule_on(CK_GLOBAL_RACE)) return false;
  const int other = fiber_of(t.who);
  if (other < 0)
    report(CK_GLOBAL_RACE, pc, pcs[t.pc], -1, "%s global memory that a copy may still %s: nothing orders the two%s",
           does, did, more);
  else
    report(CK_GLOBAL_RACE, pc, pcs[t.pc], other, "%s global memory that {f:%d} may still %s: nothing orders the two%s",
           does, other, did, more);
  return true;
}

bool shadow_global(const void *pc, const void *p, size_t bytes, enum ck_global kind, int who, int value) {
  const fiber *f = self();
  if (!planes && !(planes = calloc(PLANES, sizeof *planes))) return true;
  const touch t = {.who = (uint16_t)who, .pc = pc_number(pc), .value = (uint32_t)value & 0x1fffffff, .used = 1};
  const char *does = kind == CK_GLOBAL_READ ? "reads" : kind == CK_GLOBAL_ADD ? "adds to" : "writes";
  region *r = NULL;
  for (uintptr_t at = (uintptr_t)p & ~(uintptr_t)3; at < (uintptr_t)p + bytes; at += bytes >= 512 ? LINE : WORD_CELL) {
    if (!r || r->number != at / LINE / LINES) r = region_of(at / LINE / LINES);
    plane *g = r ? plane_of(r, at) : NULL;
    if (!g) break;
    global_word *w = &g->word[at / LINE % LINES];
    uint8_t *last = &g->kind[at / LINE % LINES];
    const bool both_add = kind == CK_GLOBAL_ADD && *last == CK_GLOBAL_ADD && !ck.request->ordered;
    if (!both_add && unordered(f, w->write) &&
        global_race(pc, w->write, does, *last == CK_GLOBAL_ADD ? "add to" : "write",
                    kind == CK_GLOBAL_ADD ? " (a deterministic kernel adds in order)" : ""))
      return false;
    if (kind == CK_GLOBAL_READ) {
      int i = 0;
      while (i < GLOBAL_READERS - 1 && w->read[i].used && w->read[i].who != t.who) i++;
      w->read[i] = t;
      continue;
    }
    for (int i = 0; i < GLOBAL_READERS; i++)
      if (unordered(f, w->read[i]) && global_race(pc, w->read[i], does, "read", "")) return false;
    memset(w->read, 0, sizeof w->read);
    w->write = t;
    *last = (uint8_t)kind;
  }
  return true;
}
