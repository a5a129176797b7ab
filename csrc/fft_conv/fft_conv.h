// Long convolution: what host half and kernels share. Plain C.
#pragma once
#include <stdint.h>
#include "tile/gmap.h"

// The host fills `spectrum` of the row like this, in floats. Rows of one pass: tables (fft_conv_tiles.h: L and F as re,
// im, -im, T as re, im, E and O, the folded L's halves, the folded T), the filters' spectra, tiles of 4096 numbers of
// which each is two fp16, re and im, and a factor for every row of 64 of them. Else fft_complex[heads][blocks of the
// filter][4096] behind the tables, which are not used.
enum {
  FFT_BLOCK = 4096, FFT_TABLES = 14, FFT_TABLE_FLOATS = FFT_TABLES * 64 * 64 / 2, FFT_UNIT_FLOATS = 2 * FFT_BLOCK
};
enum { FFT_LEFT = 0, FFT_RIGHT = 3, FFT_TWISTS = 6, FFT_HALVES = 8, FFT_FOLDED_LEFT = 10, FFT_FOLDED_TWISTS = 12 };
enum { FFT_FP32, FFT_BF16, FFT_FP16 };
typedef struct fft_complex { MG_ALIGNAS(8) float re; float im; } fft_complex;

// [batch, heads, length], strides in elements, and what each element is multiplied with or NULL.
typedef struct fft_rows {
  const void *data, *gate;
  int64_t batch, head, gate_batch, gate_head;
  int type, gate_type, length;
  int reversed;               // the last element is the first
  int circular;               // in front of the first element is the last
} fft_rows;

// Spectra of blocks of 4096 elements, of which each is a task.
typedef struct fft_spectra_params {
  fft_rows x;
  const void *skip;           // [heads] or NULL: added to element 0
  int skip_type;
  int tasks, batches, first_row;            // row h batches + b; the first one of this launch
  int blocks, past;           // of a row, of which `past` are in front of element 0
  int pairs;                  // block s is the real part, block s - 1 the imaginary one
  fft_complex *out;           // [task][4096]
} fft_spectra_params;

// Spectra of the filters of rows of N = 64 << log_rows <= 4096 elements. A task: 4096 numbers of whole filters.
typedef struct fft_filters_params {
  const void *k, *skip;       // [heads, taps]; [heads] or NULL: added to element 0
  int k_type, skip_type, taps, heads, log_rows, plain, tasks;
  int accumulators;           // `out` in the order of store_acc(); 0: of store_columns(), for fft_conv.cu
  int log_parts, quarter;     // of rows of fft_conv_long.cu: tile h 2^log_parts + j is p_j of filter h
  void *tables;               // as `spectrum`
  float *out, *factors;
} fft_filters_params;

// Sums of products of spectra, and their way back. A task of fft_conv_sums: one block of one row of the result.
// Forward: sum over n of a[row, block - n] b[head, n]. Of filters: sum over batch and n of a[row, n] conj(b[row, n -
// block]).
typedef struct fft_sums_params {
  const fft_complex *a, *b;
  const float *parts;                       // of_parts: of fft_conv_bwd, for each task `chunks` tiles of re and of im
  int of_parts, chunks, rows, log_rows, plain;      // as there; else log_rows is 6, plain 0
  int log_parts, quarter;                   // of rows of fft_conv_long.cu, for fft_conv_parts
  int tasks, batches, first_row, blocks;    // blocks: of a row of the result
  int of_filters;
  int a_blocks, b_blocks, past;             // units of a row; past: of the operand that begins in front of element 0
  void *out;                                // [batch, heads, length] or NULL
  const void *gate;
  int64_t out_batch, out_head, gate_batch, gate_head;
  int type, length, reversed;
  void *first;                              // [heads] or NULL: element 0 once more, of filters
  int first_type;
} fft_sums_params;

// What both kernels of one pass read and write; pre, post: filled where they are given.
typedef struct fft_operands { gmap u, pre, post, out, tables; } fft_operands;

// Rows of 4096 R elements. A task: a row.
typedef struct fft_long_params {
  fft_operands of;
  gmap factor, other;                       // filled where has_other says so: other = factor (k * (pre u))
  const float *filter, *factors;
  int tasks, batches, quarter, has_pre, has_post, has_other, conjugate;
} fft_long_params;

// Gradients of rows of 64 << log_rows = N <= 4096 elements. A task: `step` batch entries of a filter's tile. Of longer
// ones, sums only: tile h 2^log_parts + j is p_j of head h.
typedef struct fft_grads_params {
  gmap u, pre, dout, post, du, dpre, dpost, tables;   // each filled where has_ says so
  const float *filter, *factors;
  float *sums;                              // [tile][chunk][re, im], in the order of an accumulator
  int tasks, batches, chunks, step, rows;   // rows of 64 elements that a batch entry has
  int log_parts, quarter;
  int log_rows, has_pre, has_post, has_du, has_dpre, has_dpost, has_sums;
} fft_grads_params;

// Rows of 64 << log_rows = N <= 4096 elements, in one pass. A task: 4096 elements of one batch entry, or of two.
typedef struct fft_conv_params {
  fft_operands of;
  const float *filter, *factors;
  int tasks, batches, rows;                 // tasks of a filter's tile; rows of 64 elements that a batch entry has
  int log_rows, has_pre, has_post;
} fft_conv_params;
