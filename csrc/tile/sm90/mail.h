// Bodies of tile/mail.h. A box has its words in the order [16 columns][thread], so that a warp's access is 512
// neighbouring bytes.
#pragma once
template<typename T, int N> struct alignas(128) mail { uint4 d[N * sizeof(T) / 32][128]; };
struct alignas(128) mail_rows { float2 d[128]; };
TILE uint32_t mail_address(const void *p, int rank) {
  uint32_t at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}
// A warp announces its own bytes. Others' may come in before, since the phase waits for the arrivals.
TILE void mail_expect(uint32_t full, uint32_t bytes) {
  if (lane() == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
}
template<typename T, int N> TILE void mail_send(mail<T, N> &box, const rt<T, N> &t, sem &full, int rank) {
  static_assert(sizeof(T) == 2, "mail_send: 16 bits");
  uint32_t to = mail_address(&box.d[0][thread_in_group()], rank), at = mail_address(&full, rank);
#pragma unroll
  for (int k = 0; k < N / 16; k++)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(to + k * 128 * 16), "r"(t.d[k][0]), "r"(t.d[k][1]), "r"(t.d[k][2]), "r"(t.d[k][3]), "r"(at) : "memory");
  mail_expect(at, 32 * N);
  trace(TRACE_ARRIVE, &full, 4);
}
TILE void mail_send(mail_rows &box, const rv &v, sem &full, int rank) {
  uint32_t to = mail_address(&box.d[thread_in_group()], rank), at = mail_address(&full, rank);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
    ::"r"(to), "r"(__float_as_uint(v.d[0])), "r"(__float_as_uint(v.d[1])), "r"(at) : "memory");
  mail_expect(at, 32 * 8);
  trace(TRACE_ARRIVE, &full, 4);
}
template<int N> TILE void mail_put(mail<float, N> &box, const rt<float, N> &t) {
#pragma unroll
  for (int i = 0; i < N / 8; i++)
    ((float4 *)box.d[i])[thread_in_group()] = make_float4(t.d[4 * i], t.d[4 * i + 1], t.d[4 * i + 2], t.d[4 * i + 3]);
}
template<typename T, int N> TILE void mail_put(mail<T, N> &box, const rt<T, N> &t) {
#pragma unroll
  for (int k = 0; k < N / 16; k++)
    box.d[k][thread_in_group()] = make_uint4(t.d[k][0], t.d[k][1], t.d[k][2], t.d[k][3]);
}
template<int N> TILE void mail_take(rt<float, N> &t, const mail<float, N> &box) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    float4 x = ((const float4 *)box.d[i])[thread_in_group()];
    t.d[4 * i] = x.x;
    t.d[4 * i + 1] = x.y;
    t.d[4 * i + 2] = x.z;
    t.d[4 * i + 3] = x.w;
  }
}
template<typename T, int N> TILE void mail_take(rt<T, N> &t, const mail<T, N> &box) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint4 x = box.d[k][thread_in_group()];
    t.d[k][0] = x.x;
    t.d[k][1] = x.y;
    t.d[k][2] = x.z;
    t.d[k][3] = x.w;
  }
}
TILE void mail_take(rv &v, const mail_rows &box) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.d[0]), "=f"(v.d[1])
    : "r"(shared_address(&box.d[thread_in_group()])) : "memory");
}
TILE void mail_done(sem &empty, int rank) { sem_arrive_at<WARPGROUP>(empty, rank); }
