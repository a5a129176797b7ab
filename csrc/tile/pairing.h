// How the columns of rows are pairs (pairs.h). Plain C: hosts fill it, kernels hand it to every operation on such rows.
#pragma once
typedef struct pairing {
  int lanes_log2;    // as many neighbouring threads hold a row, at most 128, 16 columns each: (pairs + 7) / 8 have the
                     // pairs, the others the columns behind them
  int pairs;         // columns from 2 * pairs on have no partner
  int width;         // columns that there are
  int interleaved;   // a pair is columns 2i and 2i + 1, else i and i + pairs
} pairing;
