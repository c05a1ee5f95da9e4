// Collectives between processes that share a piece of memory: each rank puts what it brings into a
// slot of its own, says so, waits for the others to say so, and takes what it needs from their
// slots. collectives.py lays the memory out and calls `collective` through ctypes (which lets go of
// Python's interpreter meanwhile); one thread a rank at a time.
//
// A tensor goes in rounds of at most one slot. In every round every rank waits for every other, so:
//   - a rank that says "round s" has read all it needs of round s - 1, and two slots a rank, used in
//     turn, are enough: nobody writes round s before all have said s - 1, that is, have done s - 2;
//   - every rank sees what call every other is in, and none mixes data of two calls.
// Sums are taken in rank order, in float32 for narrower floats, and rounded once: equal bits on
// every rank and on every run.
//
// `round` is the only word that orders memory: its store follows all writes of the slot (release),
// its load precedes all reads (acquire). With `sleepers` it is sequentially consistent on both
// sides: either who publishes sees the sleeper and wakes it, or the sleeper sees the round.

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>

#include <poll.h>
#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "floats.h"

namespace {

constexpr int MAX_RANKS = 64;
constexpr int64_t LINE = 128;  // two cache lines: processors fetch them in pairs
constexpr int64_t NAP_MS = 100;  // a dead peer is noticed within this
constexpr int BLOCK = 512;

enum Outcome { DONE, LOST, MISMATCH, LATE };
enum Op { SUM, MIN, MAX, ALL_GATHER, GATHER, BROADCAST };

struct Call {  // what a rank is in; compared over ranks
  int32_t op, dtype;
  int64_t numel, number;
  bool operator==(const Call& other) const {
    return op == other.op && dtype == other.dtype && numel == other.numel && number == other.number;
  }
};

struct alignas(LINE) Control {  // one a rank, at the front of the shared memory
  std::atomic<uint32_t> round;  // the last one that its slot holds
  std::atomic<uint32_t> left;
  alignas(LINE) std::atomic<uint32_t> sleepers;  // ranks that sleep until `round` moves
  alignas(LINE) Call calls[2];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "words shared by processes");
static_assert(sizeof(Control) == 3 * LINE, "collectives.py counts on it");

}  // namespace

struct Comm {  // this rank's own; collectives.py has the same fields
  char* memory;
  const int32_t* peers;  // a descriptor of each rank's process, readable once it has ended
  int64_t slots_at, slot_bytes;
  int64_t spin_ns, yield_ns, timeout_ms;
  int32_t rank, world;
  uint32_t round;
  int32_t culprit;
  int64_t calls;
  Call theirs;
};

namespace {

Control& control(const Comm& c, int rank) {
  return reinterpret_cast<Control*>(c.memory)[rank];
}

char* slot(const Comm& c, int rank) {
  return c.memory + c.slots_at + (2 * rank + (c.round & 1)) * c.slot_bytes;
}

// ------------------------------------------------------------------------------------- waiting

inline void pause_() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec nap{0, NAP_MS * 1000000};
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  nanosleep(&nap, nullptr);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Whichever peer has ended or left, or -1.
int gone(const Comm& c) {
  pollfd ends[MAX_RANKS];
  for (int r = 0; r < c.world; ++r) ends[r] = {c.peers[r], POLLIN, 0};  // ours is -1: ignored
  poll(ends, c.world, 0);
  for (int r = 0; r < c.world; ++r) {
    if (r == c.rank) continue;
    if (ends[r].revents || control(c, r).left.load(std::memory_order_acquire)) return r;
  }
  return -1;
}

// Until `peer` has come to this round: spin, let others run, sleep.
int await(Comm& c, int peer) {
  Control& other = control(c, peer);
  const auto come = [&] {
    return int32_t(other.round.load(std::memory_order_seq_cst) - c.round) >= 0;
  };
  if (come()) return DONE;
  const int64_t begin = now_ns();
  int64_t waited = 0;
  while (waited < c.spin_ns) {
    for (int i = 0; i < 32; ++i) {
      if (come()) return DONE;
      pause_();
    }
    waited = now_ns() - begin;
  }
  while (waited < c.spin_ns + c.yield_ns) {
    sched_yield();
    if (come()) return DONE;
    waited = now_ns() - begin;
  }
  for (;;) {
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = other.round.load(std::memory_order_seq_cst);
    if (int32_t(seen - c.round) < 0) sleep_on(other.round, seen);
    other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (come()) return DONE;
    const int lost = gone(c);
    // Who ended after this round did so once all had come to it: look again before blaming it.
    if (lost >= 0) {
      c.culprit = lost;
      return come() ? DONE : LOST;
    }
    if (now_ns() - begin > c.timeout_ms * 1000000) {
      c.culprit = peer;
      return LATE;
    }
  }
}

// This rank's slot is filled: say so, and wait until all have said so of the same call.
int meet(Comm& c, const Call& call) {
  Control& mine = control(c, c.rank);
  mine.calls[c.round & 1] = call;
  mine.round.store(c.round, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst)) wake(mine.round);
  for (int r = 0; r < c.world; ++r) {
    if (r == c.rank) continue;
    if (const int outcome = await(c, r)) return outcome;
    const Call& theirs = control(c, r).calls[c.round & 1];
    if (!(theirs == call)) {
      c.culprit = r;
      c.theirs = theirs;
      return MISMATCH;
    }
  }
  return DONE;
}

// ------------------------------------------------------------------------------------- folding

template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<bf16> {
  using type = float;
};
template <>
struct Wide<f16> {
  using type = float;
};

template <typename T>
inline typename Wide<T>::type wide(T x) {
  if constexpr (std::is_arithmetic_v<T>) return x;
  else return widen(x);
}
template <typename T>
inline T narrowed(typename Wide<T>::type x) {
  if constexpr (std::is_arithmetic_v<T>) return x;
  else {
    T out;
    narrow(x, &out);
    return out;
  }
}

struct Add {
  template <typename A>
  static A of(A a, A b) { return A(a + b); }
};
struct Least {
  template <typename A>
  static A of(A a, A b) { return b < a ? b : a; }
};
struct Most {
  template <typename A>
  static A of(A a, A b) { return b > a ? b : a; }
};

// out[i] = the ranks' values of this round, folded in rank order; [begin, end) of the round's part.
template <typename T, typename Fold>
void fold(const Comm& c, T* out, int64_t begin, int64_t end) {
  typename Wide<T>::type total[BLOCK];
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int count = int(end - at < BLOCK ? end - at : BLOCK);
    for (int r = 0; r < c.world; ++r) {
      const T* from = reinterpret_cast<const T*>(slot(c, r)) + at;
      if (r == 0)
        for (int i = 0; i < count; ++i) total[i] = wide(from[i]);
      else
        for (int i = 0; i < count; ++i) total[i] = Fold::of(total[i], wide(from[i]));
    }
    for (int i = 0; i < count; ++i) out[at - begin + i] = narrowed<T>(total[i]);
  }
}

// Three ranks and more, and enough to add: each rank adds a share, and all take it from there.
constexpr int64_t SHARE_FROM = 32 << 10;

template <typename T, typename Fold>
int reduce(Comm& c, const Call& call, T* x) {
  const int64_t most = c.slot_bytes / int64_t(sizeof(T));
  int64_t at = 0;
  do {
    const int64_t count = call.numel - at < most ? call.numel - at : most;
    ++c.round;
    if (count) std::memcpy(slot(c, c.rank), x + at, count * sizeof(T));
    if (const int outcome = meet(c, call)) return outcome;
    if (c.world < 3 || count * int64_t(sizeof(T)) < SHARE_FROM) {
      fold<T, Fold>(c, x + at, 0, count);
    } else {
      const auto share = [&](int r) { return count * r / c.world; };
      // Folded into x first: the slot of the next round may be written, this round's may not.
      fold<T, Fold>(c, x + at + share(c.rank), share(c.rank), share(c.rank + 1));
      ++c.round;
      const int64_t begin = share(c.rank), end = share(c.rank + 1);
      std::memcpy(slot(c, c.rank), x + at + begin, (end - begin) * sizeof(T));
      if (const int outcome = meet(c, call)) return outcome;
      for (int r = 0; r < c.world; ++r)
        if (r != c.rank)
          std::memcpy(x + at + share(r), slot(c, r), (share(r + 1) - share(r)) * sizeof(T));
    }
    at += count;
  } while (at < call.numel);
  return DONE;
}

int sum(Comm& c, const Call& call, void* x) {
  switch (call.dtype) {  // in the order of collectives.py; whole numbers wrap around
    case 0: return reduce<float, Add>(c, call, static_cast<float*>(x));
    case 1: return reduce<double, Add>(c, call, static_cast<double*>(x));
    case 2: return reduce<bf16, Add>(c, call, static_cast<bf16*>(x));
    case 3: return reduce<f16, Add>(c, call, static_cast<f16*>(x));
    case 4: case 5: return reduce<uint8_t, Add>(c, call, static_cast<uint8_t*>(x));
    case 6: return reduce<uint16_t, Add>(c, call, static_cast<uint16_t*>(x));
    case 7: return reduce<uint32_t, Add>(c, call, static_cast<uint32_t*>(x));
    default: return reduce<uint64_t, Add>(c, call, static_cast<uint64_t*>(x));
  }
}

// ------------------------------------------------------------------------------------- copying

// Bytes [at, at + count) of rank r's tensor, rows of `row` bytes, into out: rows of all ranks by
// turns.
void place(char* out, const char* from, int64_t at, int64_t count, int64_t row, int r, int world) {
  while (count) {
    const int64_t within = at % row, part = row - within < count ? row - within : count;
    std::memcpy(out + (at / row * world + r) * row + within, from, part);
    from += part, at += part, count -= part;
  }
}

// `row`: bytes of the tensor's dims from the joined one on.
int move(Comm& c, const Call& call, const char* in, char* out, int64_t size, int64_t row) {
  const int64_t bytes = call.numel * size;
  const bool gives = call.op != BROADCAST || c.rank == 0;
  const bool takes = call.op == BROADCAST ? c.rank != 0 : call.op == ALL_GATHER || c.rank == 0;
  int64_t at = 0;
  do {
    const int64_t count = bytes - at < c.slot_bytes ? bytes - at : c.slot_bytes;
    ++c.round;
    if (gives && count) std::memcpy(slot(c, c.rank), in + at, count);
    if (const int outcome = meet(c, call)) return outcome;
    if (takes && call.op == BROADCAST) {
      if (count) std::memcpy(out + at, slot(c, 0), count);
    } else if (takes) {
      for (int r = 0; r < c.world; ++r) place(out, slot(c, r), at, count, row, r, c.world);
    }
    at += count;
  } while (at < bytes);
  return DONE;
}

}  // namespace

// One collective of the group. `in` has numel elements of `size` bytes; sums, minima and maxima are
// taken in place (out is in). Blocks until every rank is in it, one has ended (LOST), is in another
// call (MISMATCH), or none of these for as long as the time limit (LATE); c tells which rank.
extern "C" int collective(Comm* c, int op, int dtype, int64_t numel, int64_t size, int64_t row,
                          const void* in, void* out) {
  const Call call{op, dtype, numel, ++c->calls};
  switch (op) {
    case SUM: return sum(*c, call, out);
    case MIN: return reduce<int64_t, Least>(*c, call, static_cast<int64_t*>(out));
    case MAX: return reduce<int64_t, Most>(*c, call, static_cast<int64_t*>(out));
    default:
      return move(*c, call, static_cast<const char*>(in), static_cast<char*>(out), size, row);
  }
}

// This rank makes no more calls: who waits for it, now or later, is told that it is lost.
extern "C" void leave_collectives(Comm* c) {
  Control& mine = control(*c, c->rank);
  mine.left.store(1, std::memory_order_seq_cst);
  wake(mine.round);
}
