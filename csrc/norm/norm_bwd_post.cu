// Behind norm_bwd.cu: dweight and dbias, the sums of all blocks' sums, always in the same order. A block adds up 64
// columns of one of them. Each of its warpgroups has 16 lines in registers at a time, and then they meet.
#include "tile/lines.h"
#include "norm/norm.h"

struct shared { sv<256> sums[GROUPS]; };
typedef norm_bwd_post_params params;
typedef lt<1> tile;
enum { LINES = 16, COLUMNS = 64, AT_ONCE = 4 };            // AT_ONCE: loads under way together
TILE void init(shared &) {}

TILE void compute(const params &p, shared &s, int warpgroup) {
  int which = block_index() / (p.groups * p.col_blocks), rest = block_index() - which * p.groups * p.col_blocks;
  int group = rest / p.col_blocks, col = (rest - group * p.col_blocks) * COLUMNS;
  int64_t part = 2 * p.groups * p.columns;
  const float *from = p.partials + ((int64_t)which * p.groups + group) * p.columns + col;
  int left = (int)p.columns - col;
  tile sum;
  fill(sum, 0.f);
  for (int i = warpgroup * LINES * AT_ONCE; i < p.parts; i += GROUPS * LINES * AT_ONCE) {
    tile t[AT_ONCE];
    CONSTANT_INDEX for (int k = 0; k < AT_ONCE; k++)
      load_begin<EIGHTS>(t[k], from + (i + k * LINES) * part, part, LINES, p.parts - i - k * LINES, left);
    CONSTANT_INDEX for (int k = 0; k < AT_ONCE; k++) {
      load_end<float>(t[k]);
      each<EIGHTS>(sum, LINES, left, [](float &sum, float x) { sum += x; }, t[k]);
    }
  }
  put_columns(s.sums[warpgroup], sum);
  bar_sync(1, 128 * GROUPS);
  if (warpgroup > 0) return;
  take_columns(sum, s.sums[0]);
  for (int i = 1; i < GROUPS; i++) {
    tile more;
    take_columns(more, s.sums[i]);
    each<EIGHTS>(sum, LINES, left, [](float &sum, float x) { sum += x; }, more);
  }
  void *to = which ? p.dbias : p.dweight;
  int is_float = which ? p.bias_is_float : p.weight_is_float;
  int64_t first = (int64_t)group * p.dim + col;
  if (!to) return;
  if (is_float) save<SINGLES>((float *)to + first, 0, sum, LINES, 1, p.dim - col);
  else save<SINGLES>((elem *)to + first, 0, sum, LINES, 1, p.dim - col);
}

typedef block<params, shared, init, role<compute, WARPGROUP, GROUPS, 0>> kernel;
ENTRY(kernel, 1, COLUMNS)
