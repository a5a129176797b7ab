// Bodies of tile/lines.h on the CPU, and for the checker. Loads are whole in their first half. Column c of line r is at
// d[r * width + c].
#pragma once
#ifdef CHECK
#define LINE_STATE state_of_registers state;
#else
#define LINE_STATE
#endif
enum { MOST_LINES = 16, LINE_PARTS = 16 };        // parts of a line's sum, so that loops over columns vectorise
template<int J> struct lt { LINE_RULES(J); alignas(64) float d[1024 * J]; LINE_STATE };
struct lv { alignas(64) float d[MOST_LINES]; LINE_STATE };
struct lsum { alignas(64) float d[MOST_LINES][LINE_PARTS]; LINE_STATE };
#undef LINE_STATE
template<typename T, int C> struct alignas(128) sl { T d[C]; };
template<int J> struct alignas(128) pl { float d[1024 * J]; };

template<int J> TILE int line_width(const lt<J> &, int lines) { return 1024 * J / lines; }
template<int J> TILE int line_columns(const lt<J> &t, int lines, int n) {
  const int width = line_width(t, lines);
  return n < 0 ? 0 : n < width ? n : width;
}
template<int, typename T, int J> TILE void load_begin(lt<J> &t, const T *g, int64_t ld, int lines, int m, int n) {
  called_by<WARPGROUP>();
  writes(t);
  const int width = line_width(t, lines), columns = line_columns(t, lines, n);
  for (int r = 0; r < lines; r++) {
    const int there = r < m ? columns : 0;
    float *line = t.d + r * width;
    if (there) touches_global(g + r * ld, there * sizeof(T), GLOBAL_READ);
    if (there) widen_row(line, g + r * ld, there);
    for (int c = there; c < width; c++) line[c] = 0.f;
  }
}
template<typename T, int J> TILE void load_end(lt<J> &t) { changes(t); }
template<typename T, int J> TILE void round_lines(lt<J> &t);
template<typename T, int J> TILE void unend(lt<J> &t) { round_lines<T>(t); }
template<typename T, int J> TILE void add_begun(lt<J> &t, const lt<J> &other) {
  reads(other);
  changes(t);
  for (int i = 0; i < 1024 * J; i++) t.d[i] += other.d[i];
  round_lines<T>(t);
}
// What is looked at of it, in units of 32 bytes, as of tiles.
template<typename T, int C> TILE region line_part(const sl<T, C> &s, int c0, int n) {
  return {s.d + c0, 1, 0, (n * (int)sizeof(T) + 31) / 32 * 32};
}
template<typename T, int C> TILE void bulk_load(sl<T, C> &d, const T *g, int n, sem &s) {
  global_vector(&d, (const float *)g);
  copy_reads_global(g, n * sizeof(T), s);
  issue_load(d, line_part(d, 0, n), s, n * (int)sizeof(T),
             [=, &d] { memcpy((void *)d.d, g, n * sizeof(T)); });
}
template<int J> TILE void load(lt<J> &t, const pl<J> &s) {
  called_by<WARPGROUP>();
  reads_shared(whole(s));
  writes(t);
  memcpy(t.d, s.d, sizeof s.d);
}
template<int J> TILE void store(pl<J> &d, const lt<J> &t) {
  called_by<WARPGROUP>();
  reads(t);
  writes_shared(d, whole(d));
  memcpy(d.d, t.d, sizeof d.d);
}
template<typename T, int C, int J> TILE void load_begin(lt<J> &t, const sl<T, C> &s, int c0, int n) {
  called_by<WARPGROUP>();
  const int columns = line_columns(t, 1, n - c0);
  if (columns) reads_shared(line_part(s, c0, columns));
  writes(t);
  if (columns) widen_row(t.d, s.d + c0, columns);
  for (int c = columns; c < 1024 * J; c++) t.d[c] = 0.f;
}
template<int, typename T, int J> TILE void save(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n) {
  reads(t);
  const int width = line_width(t, lines), columns = line_columns(t, lines, n);
  for (int r = 0; r < lines && r < m && columns; r++) {
    touches_global(g + r * ld, columns * sizeof(T), GLOBAL_WRITE);
    narrow_row(g + r * ld, t.d + r * width, columns);
  }
}
template<typename T, int J> TILE void save_begun(T *g, int64_t ld, const lt<J> &t, int lines, int m, int n) {
  save<EIGHTS>(g, ld, t, lines, m, n);
}
TILE void load(lv &v, const float *g, int64_t stride, int lines, int m) {
  writes(v);
  for (int r = 0; r < lines && r < m; r++) touches_global(g + r * stride, sizeof(float), GLOBAL_READ);
  for (int r = 0; r < MOST_LINES; r++) v.d[r] = r < lines && r < m ? g[r * stride] : 0.f;
}
TILE void save(float *g, int64_t stride, const lv &v, int lines, int m) {
  reads(v);
  for (int r = 0; r < lines && r < m; r++) {
    touches_global(g + r * stride, sizeof(float), GLOBAL_WRITE);
    g[r * stride] = v.d[r];
  }
}

template<typename T, int J> TILE void round_lines(lt<J> &t) {
  changes(t);
  T rounded[1024];
  for (int i = 0; i < 1024 * J; i += 1024) {
    narrow_row(rounded, t.d + i, 1024);
    widen_row(t.d + i, rounded, 1024);
  }
}
template<int J> TILE void fill(lt<J> &t, float x) {
  writes(t);
  for (float &d : t.d) d = x;
}
TILE void fill(lv &v, float x) {
  writes(v);
  for (float &d : v.d) d = x;
}
TILE void clear(lsum &s) {
  writes(s);
  memset(s.d, 0, sizeof s.d);
}
template<int J> TILE void copy(lt<J> &d, const lt<J> &s) {
  reads(s);
  writes(d);
  memcpy(d.d, s.d, sizeof s.d);
}
template<class F> __attribute__((flatten)) TILE void map(lv &d, const lv &a, F f) {
  reads(a);
  writes(d);
  for (int r = 0; r < MOST_LINES; r++) d.d[r] = f(a.d[r]);
}
template<class F> __attribute__((flatten)) TILE void map(lv &d, const lv &a, const lv &b, F f) {
  reads(a, b);
  writes(d);
  for (int r = 0; r < MOST_LINES; r++) d.d[r] = f(a.d[r], b.d[r]);
}
template<class F> __attribute__((flatten)) TILE void map(lv &d, const lv &a, const lv &b, const lv &c, F f) {
  reads(a, b, c);
  writes(d);
  for (int r = 0; r < MOST_LINES; r++) d.d[r] = f(a.d[r], b.d[r], c.d[r]);
}

template<int J> TILE float &line_at(lt<J> &t, int, int i, int) { return t.d[i]; }
template<int J> TILE float line_at(const lt<J> &t, int, int i, int) { return t.d[i]; }
template<typename T, int J> TILE float line_at(const begun<T, J> &b, int, int i, int) { return b.t.d[i]; }
TILE float line_at(const lv &v, int r, int, int) { return v.d[r]; }
TILE float &line_at(lsum &s, int r, int, int part) { return s.d[r][part]; }
template<class X> TILE void seen_by_each(X &x) { changes(x); }
template<class X> TILE void seen_by_each(const X &x) { reads(x); }
TILE void seen_by_each(lv &x) { reads(x); }
template<typename T, int J> TILE void seen_by_each(begun<T, J> &x) { reads(x.t); }
template<int, int J, class F, class... X>
__attribute__((flatten)) TILE void each(lt<J> &t, int lines, int n, F f, X &...x) {
  seen_by_each(t);
  (seen_by_each(x), ...);
  const int width = line_width(t, lines), columns = line_columns(t, lines, n);
  for (int r = 0; r < lines; r++) {
    int c = 0;
    for (; c + LINE_PARTS <= columns; c += LINE_PARTS) {
#pragma GCC ivdep
      for (int part = 0; part < LINE_PARTS; part++)
        f(t.d[r * width + c + part], line_at(x, r, r * width + c + part, part)...);
    }
    for (int part = 0; c + part < columns; part++)
      f(t.d[r * width + c + part], line_at(x, r, r * width + c + part, part)...);
  }
}
template<int J, class F> TILE void each_eight(lt<J> &t, int lines, int n, F f) {
  changes(t);
  const int width = line_width(t, lines), columns = line_columns(t, lines, n);
  for (int r = 0; r < lines; r++)
    for (int c = 0; c < columns; c += 8) f(t.d + r * width + c, r, c);
}
template<class F> TILE bool any(const lv &v, int lines, F f) {
  reads(v);
  bool some = false;
  for (int r = 0; r < lines; r++) some = some || f(v.d[r]);
  if (lines == 2) wg_sync();
  return some;
}

// What two parts make together: their sum, or the larger of those that are not negative.
TILE float sum_of_two(float x, float y) { return x + y; }
TILE float most_of_two(float x, float y) { return x > y ? x : y; }
template<class F> TILE float of_parts(const lsum &s, int r, F f) {
  float x = 0.f;
  for (float part : s.d[r]) x = f(x, part);
  return x;
}
template<class F> TILE void reduce_parts(lv &v, const lsum &s, int lines, F f) {
  reads(s);
  writes(v);
  for (int r = 0; r < MOST_LINES; r++) v.d[r] = r < lines ? of_parts(s, r, f) : 0.f;
}
template<class F> TILE void put_parts(sv<4> &d, const lsum &s, F f) {
  called_by<WARPGROUP>();
  reads(s);
  writes_shared(d, whole(d));
  d.d[0] = of_parts(s, 0, f);
  d.d[2] = of_parts(s, 1, f);           // 0 of one line
  d.d[1] = d.d[3] = 0.f;
}
TILE void reduce(lv &v, const lsum &s, int lines) { reduce_parts(v, s, lines, sum_of_two); }
TILE void reduce_most(lv &v, const lsum &s, int lines) { reduce_parts(v, s, lines, most_of_two); }
TILE void put_sums(sv<4> &d, const lsum &s) { put_parts(d, s, sum_of_two); }
TILE void put_most(sv<4> &d, const lsum &s) { put_parts(d, s, most_of_two); }
TILE void take_sums(lv &v, const sv<4> &d, int lines) {
  called_by<WARPGROUP>();
  reads_shared(whole(d));
  writes(v);
  for (float &x : v.d) x = 0.f;
  v.d[0] = lines == 1 ? d.d[0] + d.d[1] + (d.d[2] + d.d[3]) : d.d[0] + d.d[1];
  if (lines > 1) v.d[1] = d.d[2] + d.d[3];
}
TILE void take_most(lv &v, const sv<4> &d, int lines) {
  called_by<WARPGROUP>();
  reads_shared(whole(d));
  writes(v);
  for (float &x : v.d) x = 0.f;
  v.d[0] = lines == 1 && d.d[2] > d.d[0] ? d.d[2] : d.d[0];
  if (lines > 1) v.d[1] = d.d[2];
}
TILE void put_columns(sv<256> &d, const lt<1> &t) {
  called_by<WARPGROUP>();
  reads(t);
  writes_shared(d, whole(d));
  memset(d.d, 0, sizeof d.d);
  for (int r = 0; r < MOST_LINES; r++)
    for (int c = 0; c < 64; c++) d.d[r / 4 * 64 + c] += t.d[r * 64 + c];
}
TILE void take_columns(lt<1> &t, const sv<256> &d) {
  called_by<WARPGROUP>();
  reads_shared(whole(d));
  writes(t);
  for (int i = 0; i < 1024; i++) t.d[i] = d.d[i % 64] + d.d[64 + i % 64] + d.d[128 + i % 64] + d.d[192 + i % 64];
}
