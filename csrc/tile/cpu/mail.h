// Bodies of tile/mail.h, on the hooks of hooks.h. Sizes are the GPU's.
#pragma once
template<typename T, int N> struct alignas(128) mail { T d[64][N]; };
struct alignas(128) mail_rows { float d[64], unused[192]; };
template<class Box, class Tile> TILE void mail_write(Box &box, const Tile &t) {
  called_by<WARPGROUP>();
  reads(t);
  writes_shared(box, whole(box));
  memcpy(box.d, t.d, sizeof t.d);
}
template<class Box, class Tile> TILE void mail_copy(Box &box, const Tile &t, sem &full, int rank) {
  mail_write(at_rank(box, rank), t);
  sem_arrive_at<WARPGROUP, ORDERED>(full, rank);
}
template<typename T, int N> TILE void mail_send(mail<T, N> &box, const rt<T, N> &t, sem &full, int rank) {
  mail_copy(box, t, full, rank);
}
TILE void mail_send(mail_rows &box, const rv &v, sem &full, int rank) { mail_copy(box, v, full, rank); }
template<typename T, int N> TILE void mail_put(mail<T, N> &box, const rt<T, N> &t) { mail_write(box, t); }
template<class Box, class Tile> TILE void mail_read(Tile &t, const Box &box) {
  reads_shared(whole(box));
  writes(t);
  memcpy(t.d, box.d, sizeof t.d);
}
template<typename T, int N> TILE void mail_take(rt<T, N> &t, const mail<T, N> &box) { mail_read(t, box); }
TILE void mail_take(rv &v, const mail_rows &box) { mail_read(v, box); }
TILE void mail_done(sem &empty, int rank) { sem_arrive_at<WARPGROUP, ORDERED>(empty, rank); }
