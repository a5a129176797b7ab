// Parameters of the kernels of one to a few steps of the delta rules. Plain C: filled by delta_step.c.
#pragma once
#include "ssd/step.h"

// Per head, or per channel of a head: [batch, steps, heads, columns]; fp32, or as the inputs; 0 where data is NULL.
typedef struct delta_numbers {
  const void *data;
  int64_t batch, step, head;        // strides in elements
  int is_float;
} delta_numbers;

typedef struct delta_step_params {
  step_states states;               // rows and columns as they lie in memory. Its slots are not used
  // The place whose state a sample begins with: [batch, ...], or NULL: its number. accepted: the one of this token,
  // counted from 1, of `wide` tokens; NULL: the first.
  const int *places, *accepted;
  int64_t places_stride;
  int wide, update;                 // update: the last state goes back where the first was
  // Where the states behind tokens go, data NULL: nowhere. The place of a sample's token is slots[kept_slots sample +
  // kept_token token], of no state where there is no such, or the sample's number. Token t is kept_step t behind it.
  step_states kept;
  int64_t kept_slots, kept_token, kept_step;
  step_vectors q, k, v, out;
  delta_numbers g, bias, beta, a_log;
  float scale, lower_bound;         // lower_bound: 0: none
  int l2norm, beta_form;            // beta_form 1: beta is the sigmoid of what is given, 2: twice that
  int steps;
  divisor heads, group_heads, parts;        // heads: of v; group_heads: that share q and k; parts: of a head's state
} delta_step_params;
