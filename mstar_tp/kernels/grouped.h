// A step's adapter rows and the slots they read, as cpu.py fills them in.

#pragma once

#include <cstdint>

extern "C" {

// Rows of several slots, a slot's side by side: group g's are `order[indptr[g]]` on, ascending, of
// slot `slots[g]`. `scratch` has room for [rows, slices * rank] float32 of any linear.
struct GroupedRows {
  const int64_t *order, *slots, *indptr;
  int64_t groups;
  float* scratch;
};

// One linear's factors: a slot's A [slices * rank, in] and B [rank, out] lie at `slot * a_slot` and
// `slot * b_slot`; only its first `ranks[slot]` rows of each slice are read. Slice i's columns end
// at `ends[i]`.
struct Factors {
  const void *a, *b;
  int64_t a_slot, b_slot;
  const int64_t *ranks, *ends;
  int64_t slices, rank;
};
}
