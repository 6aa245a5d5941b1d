// The tiles of fused.py, compiled for CPUs: the same equation, one parallel region a pass.
//
// Shapes as in fused.py: B batch, T queries, M memory, S = M + T keys, P persistent vectors, N
// heads, H head width. Arithmetic and accumulators are float32; operands may be bfloat16.
//
// Work is cut into items of one head and some queries. An item needs nothing from another: what
// several of them add to (dKp, dVp, dr, du, dw; dk and dv if a sequence is cut) each writes to a
// part of its own, for the caller to add up in order. So results do not depend on which thread did
// what, and no thread waits for another.
//
// Within an item, panels of MR queries meet blocks of PC keys. A panel of scores stays in the first
// level cache from its product to its exp to the next product; RB queries of p and ds stay in the
// second, for the products that sum over queries (dV, dK, dr).
//
// Queries are scaled by log2(e) / sqrt(H), so that p = 2^score: exp without its first multiply.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// ---- vectors: W floats, whatever this CPU has ---------------------------------------------------

#if defined(__AVX512F__)
constexpr int W = 16, MR = 12;  // MR x 2 accumulators leave registers for operands
#elif defined(__AVX__)
constexpr int W = 8, MR = 6;
#else
constexpr int W = 4, MR = 6;
#endif
constexpr long PC = 512;                  // keys of a block
constexpr long RB = 48;                   // queries of a block, a multiple of MR
constexpr long LDP = PC + 16;             // row length of a tile; no power of two, for the caches
constexpr long LDR = PC + RB + 32;        // the same where rows stand shifted against each other
static_assert(MR <= W && RB % MR == 0 && LDP % W == 0 && LDR % W == 0);

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t IVec __attribute__((vector_size(4 * W)));
typedef float VecAnywhere __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Vec load(const float* x) { return *reinterpret_cast<const VecAnywhere*>(x); }
inline void store(float* x, Vec v) { *reinterpret_cast<VecAnywhere*>(x) = v; }
inline Vec splat(float x) { return x - Vec{}; }

inline IVec iota() {
  IVec i;
  for (int k = 0; k < W; k++) i[k] = k;
  return i;
}

inline float sum_of(Vec v) {
  float s = 0;
  for (int k = 0; k < W; k++) s += v[k];
  return s;
}

inline float max_of(Vec v) {
  float m = v[0];
  for (int k = 1; k < W; k++) m = std::max(m, v[k]);
  return m;
}

// 2^x to one unit in the last place; 2^-126 for anything below, about 1e38 for anything above: the
// caller sees from the sum that this happened. NaN stays NaN (each comparison with it is false).
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  x = (Vec)_mm512_min_ps(_mm512_set1_ps(126.5f), _mm512_max_ps(_mm512_set1_ps(-126.f), (__m512)x));
#else
  x = x < splat(-126.f) ? splat(-126.f) : x;
  x = x > splat(126.5f) ? splat(126.5f) : x;
#endif
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec t = x + magic, r = x - (t - magic);
  // minimax in relative error on [-1/2, 1/2]: 7.5e-8
  Vec y = splat(0.0013276471903622225f);
  y = y * r + 0.009675541363637914f;
  y = y * r + 0.055507132740323324f;
  y = y * r + 0.24022119723308233f;
  y = y * r + 0.693146967064271f;
  y = y * r + 1.000000071654788f;
  return (Vec)((IVec)y + ((IVec)t << 23));
}

// ---- matrix products ----------------------------------------------------------------------------

// C[MR, NR * W] (+)= A B, with A[m, k] at m * AM + k * AK: fixed strides need no address registers.
template <long AM, long AK, int NR>
inline __attribute__((always_inline)) void micro(long K, const float* A, const float* B, long ldb,
                                                 float* C, long ldc, bool add) {
  Vec acc[MR][NR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) acc[m][n] = add ? load(C + m * ldc + n * W) : Vec{};
  for (long k = 0; k < K; k++, A += AK, B += ldb) {
    Vec b[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) b[n] = load(B + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) acc[m][n] += A[m * AM] * b[n];
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) store(C + m * ldc + n * W, acc[m][n]);
}

// C[M, N] (+)= A B; M counts up to a multiple of MR, N to one of W: what lies there is overwritten.
template <long AM, long AK>
void product(long M, long N, long K, const float* A, const float* B, long ldb, float* C, long ldc,
             bool add) {
  long n = 0;
  for (; n + W < N; n += 2 * W)
    for (long m = 0; m < M; m += MR)
      micro<AM, AK, 2>(K, A + m * AM, B + n, ldb, C + m * ldc + n, ldc, add);
  if (n < N)
    for (long m = 0; m < M; m += MR)
      micro<AM, AK, 1>(K, A + m * AM, B + n, ldb, C + m * ldc + n, ldc, add);
}

// ---- operands in and out of scratch -------------------------------------------------------------

// Buffers of this thread, kept from call to call: fresh memory costs a page fault every 4 KiB.
enum Slot {
  kQ, kQPanel, kU, kUPanel, kW, kWPanel, kG, kGPanel, kBlockG, kBlockGPanel, kOut, kSum, kShift,
  kDelta, kTile, kTile2, kPosition, kPosition2, kKT, kK, kVT, kV, kRT, kR, kDk, kDv, kDr, kDu, kDqu,
  kDqw, kRow, kHalfK, kHalfV, kHalfT, kHalfQT, kHalfGT, kHalfQ, kHalfG, kHalfP, kHalfDs,
  kHalfPairs, kSlots
};

float* scratch(Slot slot, long n) {
  static thread_local struct Buffers {
    float* at[kSlots] = {};
    long size[kSlots] = {};
    ~Buffers() {
      for (float* p : at) std::free(p);
    }
  } buffers;
  if (buffers.size[slot] < n) {
    std::free(buffers.at[slot]);
    buffers.size[slot] = (n + 1023) / 1024 * 1024;
    buffers.at[slot] = static_cast<float*>(std::aligned_alloc(4096, 4 * buffers.size[slot]));
    if (!buffers.at[slot]) std::abort();
  }
  return buffers.at[slot];
}

float* zeroed(Slot slot, long n) {
  float* x = scratch(slot, n);
  std::memset(x, 0, 4 * n);
  return x;
}

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

struct Array {  // rows of H elements that lie `step` apart
  const void* data;
  long step;
  bool half;

  float get(long at) const {
    if (!half) return static_cast<const float*>(data)[at];
    uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[at]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  void read(long at, long H, float* to) const {
    if (!half && step == 1) {
      std::memcpy(to, static_cast<const float*>(data) + at, 4 * H);
    } else if (half && step == 1) {
      const uint16_t* from = static_cast<const uint16_t*>(data) + at;
      for (long h = 0; h < H; h++) {
        uint32_t bits = uint32_t(from[h]) << 16;
        std::memcpy(to + h, &bits, 4);
      }
    } else {
      for (long h = 0; h < H; h++) to[h] = get(at + h * step);
    }
  }
};

inline uint16_t to_half(float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void write(void* data, bool half, long at, long H, const float* from, float scale) {
  if (half) {
    uint16_t* to = static_cast<uint16_t*>(data) + at;
    for (long h = 0; h < H; h++) to[h] = to_half(from[h] * scale);
  } else {
    float* to = static_cast<float*>(data) + at;
    for (long h = 0; h < H; h++) to[h] = from[h] * scale;
  }
}

// Rows [n, H] of row length `ld` into [H, n] of row length `ldt`.
void transpose(const float* x, long ld, long n, long H, float* xT, long ldt) {
  for (long j = 0; j < n; j += 16) {
    long m = std::min(16L, n - j);
    for (long h = 0; h < H; h++)
      for (long i = 0; i < m; i++) xT[h * ldt + j + i] = x[(j + i) * ld + h];
  }
}

// Rows [n, H], n a multiple of MR, into panels [n / MR, H, MR]: the left operand of a product.
void panels(const float* x, long ld, long n, long H, float* to) {
  for (long j = 0; j < n; j += MR, to += H * MR)
    for (long h = 0; h < H; h++)
      for (long i = 0; i < MR; i++) to[h * MR + i] = x[(j + i) * ld + h];
}

}  // namespace

extern "C" {

struct Shape {
  long B, T, S, N, H, P;
  long window;          // how far back a query sees; -1: no limit
  const long* padding;  // [B] hidden first keys, or null
  long b_parts, t_parts, threads;
  long q_b, q_t, q_n;             // strides of q_BTNH; its last is 1
  long k_b, k_n, k_s;             // of k_BNSH and v_BNSH; last 1
  long r_n, r_s;                  // r_NSH; last 1
  long kp_n, kp_p, kp_h, vp_n, vp_p;  // Kp_NPH, Vp_NPH (last 1)
  long g_b, g_t, g_n;             // grad_BTNH; last 1
  long dk_part, dk_b, dk_n, dk_s; // dk and dv, by part of a sequence
  long half;      // q, kv, r, grad, out, dq: bfloat16; the rest is float32
  long dkv_half;  // dk and dv too
  const void *q, *k, *v, *r, *u, *w, *Kp, *Vp;
  const float* c;  // [N] added to a head's persistent scores, or null
  void* out;    // [B, T, N, H]
  void* rest;   // [B, T, N, H] bfloat16: what rounding `out` lost; null for float32
  float* lse;   // [N, B, T]: log2 of a row's sum of exp(score)
  const void* grad;
  void *dq, *dk, *dv;              // dq [B, T, N, H]
  float *dr, *du, *dw, *dKp, *dVp; // [parts, ...]: dr [S, N, H], du [N, H], dKp [N, P, H]
  float* dc;                       // [parts, N]
};

}

namespace {

enum Pass { kExp, kMax };

// One item: head n, queries t0 to t1 - 1 of sequences b0 to b1 - 1.
struct Item {
  const Shape& s;
  long n, b0, b1, t0, t1;
  long rows, padded, H, Hp;  // queries, the same up to a multiple of MR; H, up to one of W
  float bias;  // of the persistent scores, for 2^score: it goes into their rows' shift
  float *q, *q_panel, *out, *sum, *shift, *g, *g_panel, *delta;

  Item(const Shape& shape, long index) : s(shape) {
    long ct = index % s.t_parts, cb = index / s.t_parts % s.b_parts;
    n = index / s.t_parts / s.b_parts;
    b0 = s.B * cb / s.b_parts, b1 = s.B * (cb + 1) / s.b_parts;
    t0 = s.T * ct / s.t_parts, t1 = s.T * (ct + 1) / s.t_parts;
    rows = (b1 - b0) * (t1 - t0), padded = round_up(rows, 2 * RB);  // a multiple of 32 too
    H = s.H, Hp = round_up(H, W);
    bias = s.c ? s.c[n] * 1.4426950408889634 : 0;
    q = zeroed(kQ, padded * Hp);
    const float scale = 1.4426950408889634 / std::sqrt(double(H));
    for (long x = 0; x < rows; x++) {
      Array{s.q, 1, bool(s.half)}.read(q_at(x, s.q_b, s.q_t, s.q_n), H, q + x * Hp);
      for (long h = 0; h < H; h++) q[x * Hp + h] *= scale;
    }
    q_panel = scratch(kQPanel, padded * H);
    panels(q, Hp, padded, H, q_panel);
  }

  long query(long x) const { return t0 + x % (t1 - t0); }
  long sequence(long x) const { return b0 + x / (t1 - t0); }
  long q_at(long x, long b, long t, long head) const {
    return sequence(x) * b + query(x) * t + n * head;
  }
  long row_at(long x) const { return (n * s.B + sequence(x)) * s.T + query(x); }
};

// Persistent vectors p0 to p0 + count - 1: rows, and transposed. Zero where the tile is wider.
struct PersistentBlock {
  long count;
  float *K, *KT, *V, *VT;

  PersistentBlock(const Item& it, long p0, bool backward) {
    const Shape& s = it.s;
    count = std::min(PC, s.P - p0);
    K = zeroed(kK, LDP * it.Hp), V = zeroed(kV, LDP * it.Hp);
    KT = zeroed(kKT, LDP * it.H);
    const Array keys{s.Kp, s.kp_h, false}, values{s.Vp, 1, false};
    for (long j = 0; j < count; j++) {
      keys.read(it.n * s.kp_n + (p0 + j) * s.kp_p, it.H, K + j * it.Hp);
      values.read(it.n * s.vp_n + (p0 + j) * s.vp_p, it.H, V + j * it.Hp);
    }
    transpose(K, it.Hp, count, it.H, KT, LDP);
    if (backward) {
      VT = zeroed(kVT, LDP * it.H);
      transpose(V, it.Hp, count, it.H, VT, LDP);
    }
  }
};

// What content scores of one head take beside q: r for all distances, with zeros around.
struct Positions {
  long ld;
  float *r, *rT;  // r from -RB on

  explicit Positions(const Item& it) {
    const Shape& s = it.s;
    const long n = s.S + 2 * RB + 2 * W;
    ld = round_up(n, 32) + 16;
    r = zeroed(kR, n * it.Hp);
    rT = zeroed(kRT, ld * it.H);
    for (long j = 0; j < s.S; j++)
      Array{s.r, 1, bool(s.half)}.read(it.n * s.r_n + j * s.r_s, it.H, r + (RB + j) * it.Hp);
    transpose(r, it.Hp, n, it.H, rT, ld);
    r += RB * it.Hp, rT += RB;
  }
};

// Keys and values of a sequence: rows, and transposed.
struct Content {
  long ld;
  float *k, *kT, *v, *vT;

  Content(const Item& it, long b, bool backward) {
    const Shape& s = it.s;
    const long n = s.S + 2 * W + MR;
    ld = round_up(n, 32) + 16;
    k = zeroed(kK, n * it.Hp), v = zeroed(kV, n * it.Hp);
    for (long j = 0; j < s.S; j++) {
      const long at = b * s.k_b + it.n * s.k_n + j * s.k_s;
      Array{s.k, 1, bool(s.half)}.read(at, it.H, k + j * it.Hp);
      Array{s.v, 1, bool(s.half)}.read(at, it.H, v + j * it.Hp);
    }
    kT = scratch(kKT, ld * it.H);
    transpose(k, it.Hp, n, it.H, kT, ld);
    if (backward) {
      vT = scratch(kVT, ld * it.H);
      transpose(v, it.Hp, n, it.H, vT, ld);
    }
  }
};

// Queries of a sequence, RB at most, with both biases; and which keys each sees.
struct QueryBlock {
  const Item& it;
  long b, x0, i0, R, padded;  // first row in the item, first query, rows, the same up to MR
  long j0, j1;                // keys that any of them sees, from a multiple of W on
  float *qu, *qw, *qu_panel, *qw_panel;
  float shift[RB] = {};

  QueryBlock(const Item& item, long b_, long i0_) : it(item), b(b_), i0(i0_) {
    const Shape& s = it.s;
    const long H = it.H, Hp = it.Hp;
    x0 = (b - it.b0) * (it.t1 - it.t0) + i0 - it.t0;
    R = std::min(RB, it.t1 - i0), padded = round_up(R, MR);
    j0 = first(0) / W * W, j1 = s.S - s.T + i0 + R;
    qu = zeroed(kU, RB * Hp), qw = zeroed(kW, RB * Hp);
    const float scale = 1.4426950408889634 / std::sqrt(double(H));
    const float* u = static_cast<const float*>(s.u) + it.n * H;
    const float* w = static_cast<const float*>(s.w) + it.n * H;
    for (long i = 0; i < R; i++)
      for (long h = 0; h < H; h++) {
        qu[i * Hp + h] = it.q[(x0 + i) * Hp + h] + u[h] * scale;
        qw[i * Hp + h] = it.q[(x0 + i) * Hp + h] + w[h] * scale;
      }
    qu_panel = scratch(kUPanel, RB * H), qw_panel = scratch(kWPanel, RB * H);
    panels(qu, Hp, padded, H, qu_panel);
    panels(qw, Hp, padded, H, qw_panel);
    std::copy_n(it.shift + x0, R, shift);
  }

  // Row i sees keys first(i) to last(i) - 1.
  long first(long i) const {
    const long hidden = it.s.padding ? it.s.padding[b] : 0;
    return it.s.window < 0 ? hidden : std::max(hidden, it.s.S - it.s.T + i0 + i - it.s.window);
  }
  long last(long i) const { return it.s.S - it.s.T + i0 + std::min(i + 1, R); }
};

// 2^(score - shift) of one row, 0 outside [lo, hi), or its maximum; `position` is added if given.
template <Pass pass, bool relative>
inline void row_of(float* p, const float* position, long n, long lo, long hi, float shift,
                   float& total) {
  const Vec minus = splat(shift);
  Vec result = pass == kExp ? Vec{} : splat(total);
  for (long j = 0; j < n; j += W) {
    Vec x = load(p + j);
    if (relative) x += load(position + j);
    if (pass == kExp) x = exp2(x - minus);
    if (j < lo || j + W > hi) {
      const IVec at = iota() + int(j);
      const IVec seen = (at >= int(lo)) & (at < int(hi));
      x = seen ? x : splat(pass == kExp ? 0.f : -INFINITY);
    }
    if (pass == kExp) {
      store(p + j, x);
      result += x;
    } else {
      result = x > result ? x : result;
    }
  }
  if (pass == kExp)
    total += sum_of(result);
  else
    total = max_of(result);
}

// Content scores of a panel, rows i to i + MR - 1, against keys from j0 on, finished by `row_of`.
// Returns how many of the block's `n` columns any row of the panel sees.
template <Pass pass>
long content_panel(const QueryBlock& q, long i, const Content& c, const Positions& r, long j0,
                   long n, float* totals, float* p) {
  const long H = q.it.H, seen = std::min(n, q.last(i + MR - 1) - j0);
  if (seen <= 0) return 0;
  float* position = scratch(kPosition, MR * LDR);
  const long r0 = q.it.s.T - 1 - (q.i0 + i + MR - 1) + j0;  // of the panel's last row
  product<1, MR>(MR, seen, H, q.qu_panel + i * H, c.kT + j0, c.ld, p, LDP, false);
  product<1, MR>(MR, seen + MR - 1, H, q.qw_panel + i * H, r.rT + r0, r.ld, position, LDR, false);
  for (long m = 0; m < MR; m++)
    row_of<pass, true>(p + m * LDP, position + m * LDR + MR - 1 - m, seen, q.first(i + m) - j0,
                       q.last(i + m) - j0, q.shift[i + m], totals[m]);
  return seen;
}

// ---- persistent vectors in bfloat16, on the matrix unit (AMX) -------------------------------------
//
// Here scores stand transposed, [keys, queries]: then p and ds are left operands as they are in the
// products that sum over queries, sums over keys are vertical, and what the products that sum over
// keys want on their right is two rows interleaved. 32 keys by QB queries stay in the first-level
// cache through all of it. Statistics, exp and accumulators are float32, as everywhere.

#ifdef HAVE_AMX
constexpr long QB = 128;

// The unit's state for this thread, given back as it was found.
struct Amx {
  struct alignas(64) Config {
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } before;

  Amx() {
    _tile_storeconfig(&before);
    Config config;
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
  }
  ~Amx() {
    if (before.palette)
      _tile_loadconfig(&before);
    else
      _tile_release();
  }

  // The operands must be bfloat16 and fit; Linux must grant the unit to this process.
  static bool usable(const Shape& s) {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* request permission */, 18) == 0;
    return granted && s.half && s.H % 32 == 0;
  }
};

// C[M, N] (+)= A B, all sizes multiples of 32. B has rows in pairs: [K / 2, N, 2].
void amx_product(long M, long N, long K, const uint16_t* A, long lda, const uint16_t* B, long ldb,
                 float* C, long ldc, bool add) {
  for (long m = 0; m < M; m += 32)
    for (long n = 0; n < N; n += 32) {
      float *c0 = C + m * ldc + n, *c1 = c0 + 16 * ldc;
      if (add) {
        _tile_loadd(0, c0, 4 * ldc);
        _tile_loadd(1, c0 + 16, 4 * ldc);
        _tile_loadd(2, c1, 4 * ldc);
        _tile_loadd(3, c1 + 16, 4 * ldc);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (long k = 0; k < K; k += 32) {
        _tile_loadd(4, A + m * lda + k, 2 * lda);
        _tile_loadd(5, A + (m + 16) * lda + k, 2 * lda);
        _tile_loadd(6, B + k / 2 * ldb + 2 * n, 2 * ldb);
        _tile_loadd(7, B + k / 2 * ldb + 2 * n + 32, 2 * ldb);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, 4 * ldc);
      _tile_stored(1, c0 + 16, 4 * ldc);
      _tile_stored(2, c1, 4 * ldc);
      _tile_stored(3, c1 + 16, 4 * ldc);
    }
}

uint16_t* half_scratch(Slot slot, long n) {
  return reinterpret_cast<uint16_t*>(scratch(slot, (n + 1) / 2));
}

// Rows [n, H] in bfloat16, and transposed, [H, ldt].
void halves(const float* x, long ld, long n, long H, uint16_t* to, uint16_t* toT, long ldt) {
  for (long j = 0; j < n; j++)
    for (long h = 0; h < H; h++) {
      const uint16_t y = to_half(x[j * ld + h]);
      if (to) to[j * H + h] = y;
      if (toT) toT[h * ldt + j] = y;
    }
}

// Rows [n, H] as right operands, by blocks of QB rows: transposed, [H / 2, QB, 2], for a product
// that sums over H; and as they are, [QB / 2, H, 2], for one that sums over rows.
void right_operands(const float* x, long ld, long n, long H, uint16_t* byH, uint16_t* by_row) {
  for (long j = 0; j < n; j++) {
    const long block = j / QB * QB * H, i = j % QB;
    for (long h = 0; h < H; h++) {
      const uint16_t y = to_half(x[j * ld + h]);
      byH[block + (h / 2) * 2 * QB + 2 * i + h % 2] = y;
      if (by_row) by_row[block + (i / 2) * 2 * H + 2 * h + i % 2] = y;
    }
  }
}

// Two rows of 16 floats to bfloat16: `pairs` has them interleaved, `rows` one behind the other.
struct TwoRows {
  __m512i rows, pairs;
  TwoRows(Vec a, Vec b) {
    static const struct Order {
      alignas(64) uint16_t at[32];
      Order() {
        for (int i = 0; i < 32; i++) at[i] = i / 2 + i % 2 * 16;
      }
    } order;
    rows = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    pairs = _mm512_permutexvar_epi16(_mm512_load_si512(order.at), rows);
  }
  void store_rows(uint16_t* a, uint16_t* b) const {
    _mm256_storeu_si256((__m256i*)a, _mm512_castsi512_si256(rows));
    _mm256_storeu_si256((__m256i*)b, _mm512_extracti64x4_epi64(rows, 1));
  }
};

void amx_forward(const Item& it) {
  const Amx unit;
  const long H = it.H, Hp = it.Hp;
  uint16_t *K = half_scratch(kHalfK, PC * H), *VT = half_scratch(kHalfT, PC * H);
  uint16_t* qT = half_scratch(kHalfQT, round_up(it.padded, QB) * H);
  uint16_t* p = half_scratch(kHalfPairs, 32 * QB);
  float *score = scratch(kTile, RB * LDP), *outT = scratch(kDk, QB * H);
  right_operands(it.q, Hp, it.padded, H, qT, nullptr);
  for (long p0 = 0; p0 < it.s.P; p0 += PC) {
    const PersistentBlock block(it, p0, false);
    const long n = round_up(block.count, 32);
    halves(block.K, Hp, n, H, K, nullptr, 0);
    halves(block.V, Hp, n, H, nullptr, VT, PC);
    for (long x0 = 0; x0 < it.rows; x0 += QB) {
      const long nq = std::min(QB, round_up(it.rows - x0, 32));
      std::fill_n(outT, QB * H, 0.f);
      for (long j0 = 0; j0 < n; j0 += 32) {
        amx_product(32, nq, H, K + j0 * H, H, qT + x0 * H, 2 * QB, score, QB, false);
        for (long c = 0; c < nq; c += W) {
          const Vec shift = load(it.shift + x0 + c) - it.bias;
          Vec sum = load(it.sum + x0 + c);
          for (long j = 0; j < 32; j += 2) {
            const float* at = score + j * QB + c;
            const Vec a = j0 + j < block.count ? exp2(load(at) - shift) : Vec{};
            const Vec b = j0 + j + 1 < block.count ? exp2(load(at + QB) - shift) : Vec{};
            sum += a + b;
            _mm512_storeu_si512(p + j * QB + 2 * c, TwoRows(a, b).pairs);
          }
          store(it.sum + x0 + c, sum);
        }
        amx_product(H, nq, 32, VT + j0, PC, p, 2 * QB, outT, QB, true);
      }
      for (long x = 0; x < nq; x++)
        for (long h = 0; h < H; h++) it.out[(x0 + x) * Hp + h] += outT[h * QB + x];
    }
  }
}

// dKp and dVp of one block, as `backward_item` keeps them, its part of dq, and the sum of ds.
float amx_backward(const Item& it, const PersistentBlock& block, float* dK, float* dV, float* dq) {
  const long H = it.H, Hp = it.Hp, n = round_up(block.count, 32);
  uint16_t *K = half_scratch(kHalfK, PC * H), *V = half_scratch(kHalfV, PC * H);
  uint16_t* KT = half_scratch(kHalfT, PC * H);
  uint16_t *p = half_scratch(kHalfP, 32 * QB), *ds = half_scratch(kHalfDs, 32 * QB);
  uint16_t* ds_pairs = half_scratch(kHalfPairs, 32 * QB);
  const uint16_t *qT = half_scratch(kHalfQT, 0), *gT = half_scratch(kHalfGT, 0);
  const uint16_t *q = half_scratch(kHalfQ, 0), *g = half_scratch(kHalfG, 0);
  float *score = scratch(kTile, RB * LDP), *dP = scratch(kTile2, RB * LDP);
  float* dqT = scratch(kDqu, QB * H);
  Vec total{};
  halves(block.K, Hp, n, H, K, KT, PC);
  halves(block.V, Hp, n, H, V, nullptr, 0);
  for (long x0 = 0; x0 < it.rows; x0 += QB) {
    const long nq = std::min(QB, round_up(it.rows - x0, 32));
    std::fill_n(dqT, QB * H, 0.f);
    for (long j0 = 0; j0 < n; j0 += 32) {
      amx_product(32, nq, H, K + j0 * H, H, qT + x0 * H, 2 * QB, score, QB, false);
      amx_product(32, nq, H, V + j0 * H, H, gT + x0 * H, 2 * QB, dP, QB, false);
      for (long c = 0; c < nq; c += W) {
        const Vec shift = load(it.shift + x0 + c) - it.bias, delta = load(it.delta + x0 + c);
        for (long j = 0; j < 32; j += 2) {
          const long at = j * QB + c;
          const Vec a = exp2(load(score + at) - shift), b = exp2(load(score + at + QB) - shift);
          TwoRows(a, b).store_rows(p + at, p + at + QB);
          const Vec ds_a = a * (load(dP + at) - delta), ds_b = b * (load(dP + at + QB) - delta);
          const TwoRows two(ds_a, ds_b);
          if (j0 + j < block.count) total += ds_a;
          if (j0 + j + 1 < block.count) total += ds_b;
          two.store_rows(ds + at, ds + at + QB);
          _mm512_storeu_si512(ds_pairs + j * QB + 2 * c, two.pairs);
        }
      }
      amx_product(32, H, nq, p, QB, g + x0 * H, 2 * H, dV + j0 * Hp, Hp, true);
      amx_product(32, H, nq, ds, QB, q + x0 * H, 2 * H, dK + j0 * Hp, Hp, true);
      amx_product(H, nq, 32, KT + j0, PC, ds_pairs, 2 * QB, dqT, QB, true);
    }
    for (long x = 0; x < nq; x++)
      for (long h = 0; h < H; h++) dq[(x0 + x) * Hp + h] += dqT[h * QB + x];
  }
  return sum_of(total);
}
#endif

// ---- the two passes -----------------------------------------------------------------------------

template <Pass pass>
void forward_persistent(const Item& it, float* p, float* totals) {
#ifdef HAVE_AMX
  if (pass == kExp && Amx::usable(it.s)) return amx_forward(it);
#endif
  for (long p0 = 0; p0 < it.s.P; p0 += PC) {
    const PersistentBlock block(it, p0, false);
    for (long x = 0; x < it.rows; x += MR) {
      product<1, MR>(MR, block.count, it.H, it.q_panel + x * it.H, block.KT, LDP, p, LDP, false);
      for (long m = 0; m < MR; m++) {
        if (pass == kMax) totals[x + m] -= it.bias;  // found among scores without it
        row_of<pass, false>(p + m * LDP, nullptr, block.count, 0, block.count,
                            it.shift[x + m] - it.bias, totals[x + m]);
        if (pass == kMax) totals[x + m] += it.bias;
      }
      if (pass == kExp)
        product<LDP, 1>(MR, it.Hp, block.count, p, block.V, it.Hp, it.out + x * it.Hp, it.Hp, true);
    }
  }
}

template <Pass pass>
void forward_pass(const Item& it) {
  const Shape& s = it.s;
  float* p = scratch(kTile, RB * LDP);
  float* totals = pass == kExp ? it.sum : it.shift;
  forward_persistent<pass>(it, p, totals);
  const Positions r(it);
  float* part = scratch(kDk, RB * it.Hp);
  for (long b = it.b0; b < it.b1; b++) {
    const Content c(it, b, false);
    for (long i0 = it.t0; i0 < it.t1; i0 += RB) {
      const QueryBlock q(it, b, i0);
      for (long j0 = q.j0; j0 < q.j1; j0 += PC) {
        for (long i = 0; i < q.R; i += MR) {
          const long rows = std::min<long>(MR, q.R - i);
          float *total = totals + q.x0 + i, *out = it.out + (q.x0 + i) * it.Hp, sums[MR] = {};
          std::copy_n(total, rows, sums);
          const long n = content_panel<pass>(q, i, c, r, j0, std::min(PC, q.j1 - j0), sums, p);
          std::copy_n(sums, rows, total);
          if (pass == kMax || n == 0) continue;
          product<LDP, 1>(MR, it.Hp, n, p, c.v + j0 * it.Hp, it.Hp, part, it.Hp, false);
          for (long e = 0; e < rows * it.Hp; e += W) store(out + e, load(out + e) + load(part + e));
        }
      }
    }
  }
}

void forward_item(const Shape& s, long index) {
  Item it(s, index);
  it.shift = zeroed(kShift, it.padded);
  for (bool again = false;; again = true) {
    it.out = zeroed(kOut, it.padded * it.Hp);
    it.sum = zeroed(kSum, it.padded);
    forward_pass<kExp>(it);
    bool safe = true;
    for (long x = 0; x < it.rows; x++) safe &= 1e-20f < it.sum[x] && it.sum[x] < 1e20f;
    if (safe || again) break;
    std::fill_n(it.shift, it.padded, -INFINITY);
    forward_pass<kMax>(it);
  }
  for (long x = 0; x < it.rows; x++) {
    float* out = it.out + x * it.Hp;
    for (long h = 0; h < it.H; h++) out[h] /= it.sum[x];
    const long at = it.q_at(x, s.T * s.N * s.H, s.N * s.H, s.H);
    write(s.out, s.half, at, s.H, out, 1);
    if (s.half) {
      float* rounded = scratch(kRow, it.Hp);
      Array{s.out, 1, true}.read(at, s.H, rounded);
      for (long h = 0; h < s.H; h++) out[h] -= rounded[h];
      write(s.rest, true, at, s.H, out, 1);
    }
    s.lse[it.row_at(x)] = it.shift[x] + std::log2(it.sum[x]);
  }
}

// ds = p (dP - delta) of one row, and its sum.
inline float ds_of(const float* p, float* dP, long n, float delta) {
  const Vec d = splat(delta);
  Vec sum{};
  for (long j = 0; j < n; j += W) {
    const Vec ds = load(p + j) * (load(dP + j) - d);
    store(dP + j, ds);
    sum += ds;
  }
  return sum_of(sum);
}

void backward_item(const Shape& s, long index) {
  Item it(s, index);
  const long H = it.H, Hp = it.Hp;
  const float ln2 = 0.6931471805599453, scale = 1 / std::sqrt(double(H));
  const long part_t = index % s.t_parts, part = index % (s.b_parts * s.t_parts);
  it.shift = zeroed(kShift, it.padded), it.delta = zeroed(kDelta, it.padded);
  it.g = zeroed(kG, it.padded * Hp), it.g_panel = scratch(kGPanel, it.padded * H);
  float *dq = zeroed(kOut, it.padded * Hp), *o = scratch(kRow, 2 * Hp), *rest = o + Hp;
  for (long x = 0; x < it.rows; x++) {
    it.shift[x] = s.lse[it.row_at(x)];
    float* g = it.g + x * Hp;
    Array{s.grad, 1, bool(s.half)}.read(it.q_at(x, s.g_b, s.g_t, s.g_n), H, g);
    const long at = it.q_at(x, s.T * s.N * s.H, s.N * s.H, s.H);
    Array{s.out, 1, bool(s.half)}.read(at, H, o);
    if (s.half) Array{s.rest, 1, true}.read(at, H, rest);
    float delta = 0;
    for (long h = 0; h < H; h++) delta += g[h] * (s.half ? o[h] + rest[h] : o[h]);
    it.delta[x] = delta;
  }
  panels(it.g, Hp, it.padded, H, it.g_panel);
#ifdef HAVE_AMX
  const bool amx = Amx::usable(s);
  if (amx) {
    const long n = round_up(it.padded, QB) * H;
    right_operands(it.q, Hp, it.padded, H, half_scratch(kHalfQT, n), half_scratch(kHalfQ, n));
    right_operands(it.g, Hp, it.padded, H, half_scratch(kHalfGT, n), half_scratch(kHalfG, n));
  }
#else
  const bool amx = false;
#endif

  float *p = scratch(kTile, RB * LDP), *ds = scratch(kTile2, RB * LDP), unused[MR] = {};
  float dc = 0;
  for (long p0 = 0; p0 < s.P; p0 += PC) {
    const PersistentBlock block(it, p0, true);
    const long n = block.count;
    float *dK = zeroed(kDk, LDP * Hp), *dV = zeroed(kDv, LDP * Hp);
#ifdef HAVE_AMX
    if (amx) {
      const Amx unit;
      dc += amx_backward(it, block, dK, dV, dq);
    }
#endif
    for (long x0 = 0; x0 < it.rows && !amx; x0 += RB) {
      const long R = std::min(RB, round_up(it.rows - x0, MR));
      for (long i = 0; i < R; i += MR) {
        float *p_t = p + i * LDP, *ds_t = ds + i * LDP;
        const long x = x0 + i;
        product<1, MR>(MR, n, H, it.q_panel + x * H, block.KT, LDP, p_t, LDP, false);
        product<1, MR>(MR, n, H, it.g_panel + x * H, block.VT, LDP, ds_t, LDP, false);
        for (long m = 0; m < MR; m++) {
          const float shift = it.shift[x + m] - it.bias;
          row_of<kExp, false>(p_t + m * LDP, nullptr, n, 0, n, shift, unused[m]);
          dc += ds_of(p_t + m * LDP, ds_t + m * LDP, n, it.delta[x + m]);
        }
        product<LDP, 1>(MR, Hp, n, ds_t, block.K, Hp, dq + x * Hp, Hp, true);
      }
      product<1, LDP>(n, Hp, R, p, it.g + x0 * Hp, Hp, dV, Hp, true);
      product<1, LDP>(n, Hp, R, ds, it.q + x0 * Hp, Hp, dK, Hp, true);
    }
    for (long j = 0; j < n; j++) {
      const long at = ((part * s.N + it.n) * s.P + p0 + j) * H;
      write(s.dKp, false, at, H, dK + j * Hp, ln2);
      write(s.dVp, false, at, H, dV + j * Hp, 1);
    }
  }

  const Positions r(it);
  float* dr = zeroed(kDr, (s.S + 2 * RB + 2 * W) * Hp) + RB * Hp;
  float *du = zeroed(kDu, 2 * Hp), *dw = du + Hp;
  float *g = scratch(kBlockG, RB * Hp), *g_panel = scratch(kBlockGPanel, RB * H);
  float *dqu = scratch(kDqu, RB * Hp), *dqw = scratch(kDqw, RB * Hp);
  float* ds_shifted = scratch(kPosition2, RB * LDR);
  for (long b = it.b0; b < it.b1; b++) {
    const Content c(it, b, true);
    float* dk = zeroed(kDk, (s.S + 2 * W + MR) * Hp);
    float* dv = zeroed(kDv, (s.S + 2 * W + MR) * Hp);
    for (long i0 = it.t0; i0 < it.t1; i0 += RB) {
      const QueryBlock q(it, b, i0);
      const long R = q.padded;
      float delta[RB] = {};
      std::copy_n(it.delta + q.x0, q.R, delta);
      std::fill_n(g, R * Hp, 0.f);
      std::copy_n(it.g + q.x0 * Hp, q.R * Hp, g);
      panels(g, Hp, R, H, g_panel);
      std::fill_n(dqu, R * Hp, 0.f);
      std::fill_n(dqw, R * Hp, 0.f);
      for (long j0 = q.j0; j0 < q.j1; j0 += PC) {
        const long n = std::min(PC, q.j1 - j0), n_W = round_up(n, W);
        for (long i = 0; i < R; i += MR) {
          float *p_t = p + i * LDP, *ds_t = ds + i * LDP;
          const long seen = content_panel<kExp>(q, i, c, r, j0, n, unused, p_t);
          if (seen) {
            product<1, MR>(MR, seen, H, g_panel + i * H, c.vT + j0, c.ld, ds_t, LDP, false);
            for (long m = 0; m < MR; m++)
              ds_of(p_t + m * LDP, ds_t + m * LDP, seen, delta[i + m]);
            product<LDP, 1>(MR, Hp, seen, ds_t, c.k + j0 * Hp, Hp, dqu + i * Hp, Hp, true);
          }
          for (long m = 0; m < MR; m++) {
            // as far as the products below read: they count columns in MR
            for (long j = round_up(seen, W); j < n_W + W; j += W) {
              store(p_t + m * LDP + j, Vec{});
              store(ds_t + m * LDP + j, Vec{});
            }
            // the position scores' gradient, where they stood: by distance
            float* row = ds_shifted + (i + m) * LDR;
            const long at = R - 1 - (i + m);
            for (long j = 0; j < at; j += W) store(row + j, Vec{});
            for (long j = 0; j < n_W; j += W) store(row + at + j, load(ds_t + m * LDP + j));
            for (long j = at + n_W; j < n_W + R + MR; j += W) store(row + j, Vec{});
          }
        }
        const long r0 = s.T - q.i0 - R + j0, n_r = std::min(n_W + R - 1, s.S - r0);
        product<1, LDP>(n, Hp, R, p, g, Hp, dv + j0 * Hp, Hp, true);
        product<1, LDP>(n, Hp, R, ds, q.qu, Hp, dk + j0 * Hp, Hp, true);
        product<1, LDR>(n_r, Hp, R, ds_shifted, q.qw, Hp, dr + r0 * Hp, Hp, true);
        product<LDR, 1>(R, Hp, n_r, ds_shifted, r.r + r0 * Hp, Hp, dqw, Hp, true);
      }
      for (long i = 0; i < q.R; i++)
        for (long h = 0; h < Hp; h++) {
          const float by_content = dqu[i * Hp + h], by_position = dqw[i * Hp + h];
          du[h] += by_content;
          dw[h] += by_position;
          dq[(q.x0 + i) * Hp + h] += by_content + by_position;
        }
    }
    for (long j = 0; j < s.S; j++) {
      const long at = part_t * s.dk_part + b * s.dk_b + it.n * s.dk_n + j * s.dk_s;
      write(s.dk, s.dkv_half, at, H, dk + j * Hp, ln2);
      write(s.dv, s.dkv_half, at, H, dv + j * Hp, 1);
    }
  }
  for (long j = 0; j < s.S; j++)
    write(s.dr, false, ((part * s.S + j) * s.N + it.n) * H, H, dr + j * Hp, ln2);
  if (s.dc) s.dc[part * s.N + it.n] = dc;
  write(s.du, false, (part * s.N + it.n) * H, H, du, scale);
  write(s.dw, false, (part * s.N + it.n) * H, H, dw, scale);
  for (long x = 0; x < it.rows; x++)
    write(s.dq, s.half, it.q_at(x, s.T * s.N * H, s.N * H, H), H, dq + x * Hp, scale);
}

// Each thread takes the next item until there is none.
template <void (*item)(const Shape&, long)>
void all_items(const Shape& s) {
  std::atomic<long> next{0};
  const long n = s.N * s.b_parts * s.t_parts;
#pragma omp parallel num_threads(int(s.threads))
  for (long i = next++; i < n; i = next++) item(s, i);
}

}  // namespace

extern "C" void forward(const Shape* s) { all_items<forward_item>(*s); }
extern "C" void backward(const Shape* s) { all_items<backward_item>(*s); }
