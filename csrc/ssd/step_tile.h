// What the kernels of steps of generation share: a block's task, and how it reads and writes.
#pragma once
#include "tile/matrix.h"
#include "tile/quotient.h"
#include "ssd/ssd_fwd.h"
#include "ssd/step.h"

// A block has one of `parts` parts of one head's state of one sample.
struct step_task { int sample, head, part, place; };   // place: negative where the sample has no state
TILE step_task block_task(const step_states &s, const divisor &heads, const divisor &parts) {
  int head = quotient(block_index(), parts), sample = quotient(head, heads);
  return {sample, head - sample * heads.by, block_index() - head * parts.by, s.slots ? s.slots[sample] : sample};
}
TILE bool has_state(const step_states &s, const step_task &t) { return t.place >= 0 && t.place < s.places; }

typedef mt<ROWS, COLS> state_tile;
TILE int64_t state_at(const step_states &s, const step_task &t, int row, int col) {
  return t.place * s.place + t.head * s.head + row * s.row + col;
}
TILE void begin_state(state_tile &t, const step_states &s, int64_t at, int row, int col) {
  if (s.is_float) load_begin<ACCESS>(t, (const float *)s.data + at, s.row, s.rows - row, s.cols - col);
  else load_begin<ACCESS>(t, (const elem *)s.data + at, s.row, s.rows - row, s.cols - col);
}
TILE void end_state(state_tile &t, const step_states &s) {
  if (s.is_float) load_end<float>(t);
  else load_end<elem>(t);
}
TILE void keep_state(const state_tile &t, const step_states &s, int64_t at, int row, int col) {
  if (s.is_float) save<ACCESS>((float *)s.data + at, s.row, t, s.rows - row, s.cols - col);
  else save<ACCESS>((elem *)s.data + at, s.row, t, s.rows - row, s.cols - col);
}

TILE elem *vector_at(const step_vectors &v, int sample, int step, int head) {
  return (elem *)v.data + sample * v.batch + step * v.step + head * v.head;
}
TILE void begin_number(float &x, const step_numbers &n, int sample, int step, int head) {
  int64_t at = sample * n.batch + step * n.step + head;
  x = 0.f;
  if (n.data && n.is_float) load_begin(x, (const float *)n.data + at);
  else if (n.data) load_begin(x, (const elem *)n.data + at);
}
TILE void end_number(float &x, const step_numbers &n) {
  if (n.is_float) load_end<float>(x);
  else load_end<elem>(x);
}
