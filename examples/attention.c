// Causal attention on the CPU from C, held against three loops.
//   python setup.py build_ext --inplace          makes build/libmargay.a
//   cc -std=c17 -Icsrc examples/attention.c build/libmargay.a -lm -lpthread -ldl -o attention && ./attention
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "margay.h"

enum { BATCH = 1, HEADS = 2, ROWS = 150, DIM = 64, COUNT = BATCH * HEADS * ROWS * DIM };

static uint16_t q[COUNT], k[COUNT], v[COUNT], out[COUNT];   // bfloat16: the upper half of a float
static float lse[BATCH * HEADS * ROWS];

static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void fill(uint16_t *x, uint32_t seed) {
  for (int i = 0; i < COUNT; i++) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = to_bf16((float)(seed >> 8) / (1 << 23) - 1);
  }
}

// A view [BATCH, HEADS, ROWS, DIM] of contiguous memory.
static mg_tensor view(uint16_t *data) {
  return (mg_tensor){.data = data, .dtype = MG_BF16, .device = MG_CPU, .dims = 4, .shape = {BATCH, HEADS, ROWS, DIM},
                     .stride = {HEADS * ROWS * DIM, ROWS * DIM, DIM, 1}};
}

// Row i of one head in double precision; returns the largest difference to `row`.
static double row_error(const uint16_t *row, const uint16_t *qi, const uint16_t *keys, const uint16_t *values, int i, double scale) {
  double sum = 0, total[DIM] = {0}, worst = 0;
  for (int j = 0; j <= i; j++) {
    double score = 0;
    for (int d = 0; d < DIM; d++) score += from_bf16(qi[d]) * from_bf16(keys[j * DIM + d]);
    double p = exp(score * scale);
    sum += p;
    for (int d = 0; d < DIM; d++) total[d] += p * from_bf16(values[j * DIM + d]);
  }
  for (int d = 0; d < DIM; d++) worst = fmax(worst, fabs(total[d] / sum - from_bf16(row[d])));
  return worst;
}

int main(void) {
  fill(q, 1), fill(k, 2), fill(v, 3);
  mg_tensor tq = view(q), tk = view(k), tv = view(v), tout = view(out);
  mg_tensor tlse = {.data = lse, .dtype = MG_FP32, .device = MG_CPU, .dims = 3, .shape = {BATCH, HEADS, ROWS},
                    .stride = {HEADS * ROWS, ROWS, 1}};
  mg_attention_fwd_args args = mg_attention_fwd_defaults;
  args.out = &tout, args.lse = &tlse, args.q = &tq, args.k = &tk, args.v = &tv;
  args.scale = 1 / sqrtf(DIM), args.causal = true;
  if (mg_attention_fwd(&args)) {
    fprintf(stderr, "%s\n", mg_last_error());
    return 1;
  }
  double checksum = 0, worst = 0;
  for (int i = 0; i < COUNT; i++) checksum += from_bf16(out[i]);
  for (int row = 0; row < BATCH * HEADS * ROWS; row++) {
    const int head = row / ROWS * ROWS * DIM;
    worst = fmax(worst, row_error(out + row * DIM, q + row * DIM, k + head, v + head, row % ROWS, args.scale));
  }
  const bool agree = worst < 0.01;
  printf("checksum %.4f, largest difference %.2g: they %s\n", checksum, worst, agree ? "agree" : "differ");
  return !agree;
}
