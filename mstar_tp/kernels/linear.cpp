// Linears on the CPU, for float32 and bfloat16: packed weights with adapters' deltas, deltas alone,
// experts. cpu.cpp says how these files are compiled, called and threaded.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "deltas.h"
#include "floats.h"
#include "gemm.h"
#include "grouped.h"
#include "vectors.h"

namespace {

constexpr int64_t FEW_PANELS = 4;  // a thread, below which rows are shared out as well
constexpr int64_t FEW_ROWS = 32;   // of a step whose y stays in the cache

// A step's deltas of one linear.
template <typename T>
class Deltas {
 public:
  using H = typename Kind<T>::hidden;

  Deltas(const Factors& f, const GroupedRows& rows, const T* x, int64_t x_stride, int64_t in, T* y,
         int64_t y_stride, int64_t out)
      : f(f), g(rows), h(reinterpret_cast<H*>(rows.scratch)), in(in), out(out),
        columns(f.slices * f.rank), tiles(tiles_of(rows.indptr, rows.groups)),
        from(rows.indptr[rows.groups]), to(from.size()) {
    for (size_t r = 0; r < from.size(); ++r)
      from[r] = x + g.order[r] * x_stride, to[r] = y + g.order[r] * y_stride;
  }

  // A x of every row, shared out over the threads of the region that this is called in; all is there
  // when it returns.
  void shrink() {
    const int64_t count = int64_t(tiles.size()), bunches = (f.rank + FEW - 1) / FEW;
#pragma omp for schedule(static) collapse(3)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t slice = 0; slice < f.slices; ++slice)
        for (int64_t bunch = 0; bunch < bunches; ++bunch) {
          const Tile& tile = tiles[t];
          const int64_t slot = g.slots[tile.group], k = bunch * FEW;
          const int64_t stop = std::min<int64_t>(f.ranks[slot], k + FEW);
          if (k < stop)
            dots_all(from.data() + tile.first, tile.count,
                     a(slot) + (slice * f.rank + k) * in, stop - k, in,
                     h + tile.first * columns + slice * f.rank + k, columns);
        }
  }

  // Columns first..stop of y += B h, for the tile's rows.
  void expand_tile(const Tile& tile, int64_t first, int64_t stop) const {
    const int64_t slot = g.slots[tile.group];
    if (!f.ranks[slot]) return;
    int64_t slice = 0;
    while (first < stop) {
      while (f.ends[slice] <= first) ++slice;
      const int64_t end = std::min(f.ends[slice], stop);
      expand_all(h + tile.first * columns + slice * f.rank, columns, b(slot), out, f.ranks[slot],
                 to.data() + tile.first, tile.count, first, end);
      first = end;
    }
  }

  // The same for every row of the step from `row` to `last`.
  void expand_step(int64_t row, int64_t last, int64_t first, int64_t stop) const {
    for (int64_t i = 0; i < g.groups; ++i) {
      const int64_t *begin = g.order + g.indptr[i], *end = g.order + g.indptr[i + 1];
      const int64_t from_row = std::lower_bound(begin, end, row) - g.order;
      const int64_t to_row = std::lower_bound(begin, end, last) - g.order;
      if (from_row < to_row) expand_tile({i, from_row, to_row - from_row}, first, stop);
    }
  }

  // y += B h of every row, shared out over the threads of the region that this is called in.
  void expand() const {
    const int64_t count = int64_t(tiles.size()), chunks = (out + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static) collapse(2)
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < chunks; ++c)
        expand_tile(tiles[t], c * CHUNK, std::min(out, (c + 1) * CHUNK));
  }

 private:
  const T* a(int64_t slot) const { return static_cast<const T*>(f.a) + slot * f.a_slot; }
  const T* b(int64_t slot) const { return static_cast<const T*>(f.b) + slot * f.b_slot; }

  const Factors& f;
  const GroupedRows& g;
  H* h;
  int64_t in, out, columns;
  std::vector<Tile> tiles;
  std::vector<const T*> from;
  std::vector<T*> to;
};

// y += B(A x).
template <typename T>
void lora_delta(T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t in, int64_t out,
                const Factors& f, const GroupedRows& g, int threads) {
  Deltas<T> deltas(f, g, x, x_stride, in, y, y_stride, out);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    deltas.shrink();
    deltas.expand();
  }
}

// y = x W^T + bias, and the deltas where there are any, added to what has been rounded and written.
// Many rows get theirs panel by panel, while y is at hand; few read B row by row, in long pieces.
template <typename T>
void linear(const T* x, int64_t x_stride, int64_t rows, const T* w, const T* bias, int64_t in,
            int64_t out, T* y, int64_t y_stride, Deltas<T>* deltas, int threads) {
  const int64_t panels = (out + N - 1) / N, blocks = (rows + MOST - 1) / MOST;
  const int64_t wanted = panels < FEW_PANELS * threads ? threads : 1;
  const int64_t shares = std::min(wanted, blocks);
  const auto run = [&](int64_t unit) {
    const int64_t p = unit / shares, share = unit % shares, column = p * N;
    const int64_t cols = std::min<int64_t>(out - column, N);
    const int64_t begin = blocks * share / shares, end = blocks * (share + 1) / shares;
    float own[N] = {};
    if (bias)
      for (int64_t n = 0; n < cols; ++n) own[n] = widen(bias[column + n]);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = rows * b / blocks, stop = rows * (b + 1) / blocks;
      multiply_rows<MOST>(stop - first, x + first * x_stride, x_stride,
                          w + column * panel_inputs<T>(in), in, own, cols,
                          y + first * y_stride + column, y_stride);
    }
    if (deltas && rows > FEW_ROWS)
      deltas->expand_step(rows * begin / blocks, rows * end / blocks, column, column + cols);
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (deltas) deltas->shrink();
    if (rows > FEW_ROWS) {  // a core that others use as well holds nobody up
#pragma omp for schedule(dynamic)
      for (int64_t unit = 0; unit < panels * shares; ++unit) run(unit);
    } else {
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < panels * shares; ++unit) run(unit);
      if (deltas) deltas->expand();
    }
  }
}

// y = W[e] x for rows grouped by expert: e's are rows indptr[e]..indptr[e + 1]. W [experts, out, in].
template <typename T>
void expert_linear(const T* x, int64_t x_stride, const T* w, const int64_t* indptr, int64_t experts,
                   int64_t in, int64_t out, T* y, int threads) {
  constexpr int64_t OUTPUTS = 64;
  const int64_t chunks = (out + OUTPUTS - 1) / OUTPUTS;
  const std::vector<Tile> tiles = tiles_of(indptr, experts);
  const int64_t count = int64_t(tiles.size());
  std::vector<const T*> from(indptr[experts]);
  for (int64_t r = 0; r < indptr[experts]; ++r) from[r] = x + r * x_stride;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < chunks; ++c) {
      const Tile& tile = tiles[t];
      const int64_t first = c * OUTPUTS, stop = std::min(out, first + OUTPUTS);
      dots_all(from.data() + tile.first, tile.count, w + (tile.group * out + first) * in,
               stop - first, in, y + tile.first * out + first, out);
    }
}

template <typename T>
void linear_if_here(const T* x, int64_t x_stride, int64_t rows, const T* w, const T* bias,
                    int64_t in, int64_t out, T* y, int64_t y_stride, const Factors* f,
                    const GroupedRows* g, int threads) {
  if constexpr (Arithmetic<T>::here) {
    if (!f || !g || !g->groups)
      return linear<T>(x, x_stride, rows, w, bias, in, out, y, y_stride, nullptr, threads);
    Deltas<T> deltas(*f, *g, x, x_stride, in, y, y_stride, out);
    linear<T>(x, x_stride, rows, w, bias, in, out, y, y_stride, &deltas, threads);
  }
}

}  // namespace

// packed_size: how many values a packed weight has; 0 where this machine has no arithmetic for it.
// linear: `f` and `g` may be null.
#define PER_DTYPE(NAME, T)                                                                        \
  extern "C" int64_t packed_size_##NAME(int64_t out, int64_t in) {                                \
    return Arithmetic<T>::here ? (out + N - 1) / N * N * panel_inputs<T>(in) : 0;                 \
  }                                                                                               \
  extern "C" void pack_weight_##NAME(const T* w, int64_t stride, int64_t out, int64_t in, T* to,  \
                                     int threads) {                                               \
    pack<T>(w, stride, out, in, to, threads);                                                     \
  }                                                                                               \
  extern "C" void linear_##NAME(const T* x, int64_t xs, int64_t rows, const T* w, const T* bias,  \
                                int64_t in, int64_t out, T* y, int64_t ys, const Factors* f,      \
                                const GroupedRows* g, int threads) {                              \
    linear_if_here<T>(x, xs, rows, w, bias, in, out, y, ys, f, g, threads);                       \
  }                                                                                               \
  extern "C" void lora_delta_##NAME(T* y, int64_t ys, const T* x, int64_t xs, int64_t in,         \
                                    int64_t out, const Factors* f, const GroupedRows* g,          \
                                    int threads) {                                                \
    lora_delta<T>(y, ys, x, xs, in, out, *f, *g, threads);                                        \
  }                                                                                               \
  extern "C" void expert_linear_##NAME(const T* x, int64_t xs, const T* w, const int64_t* indptr, \
                                       int64_t e, int64_t i, int64_t o, T* y, int threads) {      \
    expert_linear<T>(x, xs, w, indptr, e, i, o, y, threads);                                      \
  }

PER_DTYPE(f32, float)
PER_DTYPE(bf16, bf16)
