// A scan with its state in registers: x is read by a product and then, for the state's update, into registers. The ring
// knows only of the product, and the next chunk's copy may overtake the loads.
// Known from: our own first scan, which got a few tiles of y wrong in some launches (state 128, H200) until its
// releases carried a fence.
// Expected: fence-read on x
// margay.check: bf16 STAGES=2
#include "tile/tile.h"

struct params { gmap x, b, dt, within, y; float *state; float a; int chunks; };
struct vectors { sv<64> decay, weight; };   // e^(l_i) and dt_j e^(l_e - l_j), where l_i sums dt a up to i and e is the
                                            // chunk's last step
struct shared {
  st<elem, 64, 64> x[STAGES], b[STAGES], within, y;
  sm<64, 4> dt[STAGES];
  vectors v[STAGES];
  ring<STAGES> dt_ring;
  ring<STAGES, ASYNC_READS> x_ring;           // BAD: ring<STAGES>
  ring<STAGES, ASYNC_READS> b_ring, v_ring;   // v: refilled by plain stores
  sem within_full;
};

TILE void init(shared &s) {
  ring_init(s.dt_ring, arrivals(1, 0, 0), arrivals(0, 1, 0));
  ring_init(s.x_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.b_ring, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, 1));
  sem_init(s.within_full, arrivals(1, 0, 0));
}

TILE void loader(const params &p, shared &s, int) {
  ring_pos at = {};
  sem_expect(s.within_full, tile_bytes(s.within));
  tma_load(s.within, p.within, s.within_full, 0, 0, 0, 0);
  for (int i = 0; i < p.chunks; i++, ring_next(s.x_ring, at)) {
    ring_acquire(s.dt_ring, at);
    ring_expect(s.dt_ring, at, sizeof s.dt[0]);
    tma_load(s.dt[at.stage], p.dt, s.dt_ring.full[at.stage], i * 64, 0, 0, 0);
    ring_acquire(s.x_ring, at);
    ring_expect(s.x_ring, at, tile_bytes(s.x[0]));
    tma_load(s.x[at.stage], p.x, s.x_ring.full[at.stage], i * 64, 0, 0, 0);
    ring_acquire(s.b_ring, at);
    ring_expect(s.b_ring, at, tile_bytes(s.b[0]));
    tma_load(s.b[at.stage], p.b, s.b_ring.full[at.stage], i * 64, 0, 0, 0);
  }
}

TILE void scan(const params &p, shared &s, int) {
  ring_pos at = {};
  float a = p.a;
  for (int i = 0; i < p.chunks; i++, ring_next(s.v_ring, at)) {
    wv<64> dt, l, out;
    ring_wait(s.dt_ring, at);
    load_col(dt, s.dt[at.stage], 0);
    ring_release<WARP>(s.dt_ring, at);
    map(l, dt, dt, [=](float d, float) { return d * a; });
    cumsum(l);
    float end = last(l);
    ring_acquire(s.v_ring, at);
    map(out, l, dt, [](float x, float) { return fast_exp2(x); });
    store(s.v[at.stage].decay, out);
    map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
    store(s.v[at.stage].weight, out);
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
  }
}

// y^T = e^(l_i) S b^T + x^T within^T,  S = e^(l_e) S + (x_j weight_j)^T b
TILE void run_state(const params &p, shared &s, int) {
  ring_pos at = {};
  rt<float, 64> state, y;
  rt<elem, 64> x, old;
  fill(state, 0.f);
  sem_wait(s.within_full, 0);
  for (int i = 0; i < p.chunks; i++, ring_next(s.x_ring, at)) {
    const vectors &v = s.v[at.stage];
    convert(old, state);
    ring_wait(s.b_ring, at);
    mma_fence();
    mma_ABt<ZERO>(y, old, s.b[at.stage]);
    mma_commit();
    ring_wait(s.v_ring, at);
    mma_wait<0>(y, old);
    map_col(y, v.decay, [](float f, float e) { return f * e; });
    float decay = get(v.decay, 63);
    map(state, [=](float f) { return f * decay; });
    ring_wait(s.x_ring, at);
    mma_fence();
    mma_AtBt<ACC>(y, s.x[at.stage], s.within);
    mma_commit();
    tma_store_wait_read();
    wg_sync();
    mma_wait<0>(y);
    store_t(s.y, y);
    load_t(x, s.x[at.stage]);
    ring_release(s.x_ring, at);
    map_col(x, v.weight, [](float f, float w) { return f * w; });
    ring_release(s.v_ring, at);
    mma_fence();
    mma_AB<ACC>(state, x, s.b[at.stage]);
    mma_commit();
    fence_async();
    wg_sync();
    tma_store(p.y, s.y, i * 64, 0, 0, 0);
    mma_wait<0>(state, x);
    ring_release(s.b_ring, at);
  }
  store(p.state, 64, state, 64, 64);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, 1, 0>, role<loader, THREAD, 1, 0>,
              role<scan, WARP, 1, 0>> kernel;
ENTRY(kernel, 64, 64)
EXAMPLE(kernel, 1, p.x = example_tensor<elem>(1, 1, 300, 64); p.b = example_tensor<elem>(1, 1, 300, 64);
        p.y = example_tensor<elem>(1, 1, 300, 64); p.dt = example_tensor<float>(1, 1, 300, 4);
        p.within = example_tensor<elem>(1, 1, 64, 64); p.state = example_words<float>(64 * 64); p.a = -1.f;
        p.chunks = 5)
