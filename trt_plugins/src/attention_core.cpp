#include "attention_core.h"

#include <initializer_list>

#include "fail.h"

namespace stof {
namespace {

bool small(int64_t v) { return v > 0 && v <= INT32_MAX; }

// Sizes of one of Q, K, V, as its layout says; strides in elements.
struct Heads {
  int64_t batch, seq, dim;
  TensorView view;
};

// False when rank or sizes do not fit `heads` heads.
bool read_heads(const TensorDesc& t, Layout layout, int64_t heads, Heads& out) {
  const int64_t* d = t.dims;
  if (layout == Layout::kBHSD) {
    if (t.rank != 4 || d[1] != heads) return false;
    out = {d[0], d[2], d[3], {nullptr, d[1] * d[2] * d[3], d[2] * d[3], d[3]}};
  } else if (t.rank == 4) {
    if (d[2] != heads) return false;
    out = {d[0], d[1], d[3], {nullptr, d[1] * d[2] * d[3], d[3], d[2] * d[3]}};
  } else {
    if (t.rank != 3 || d[2] % heads != 0) return false;
    out = {d[0], d[1], d[2] / heads, {nullptr, d[1] * d[2], d[2] / heads, d[2]}};
  }
  return small(out.batch) && small(out.seq) && small(out.dim);
}

TensorView output_view(Layout layout, int64_t heads, int64_t seq, int64_t dim) {
  if (layout == Layout::kBHSD) return {nullptr, heads * seq * dim, seq * dim, dim};
  return {nullptr, seq * heads * dim, dim, heads * dim};
}

int64_t elements(const TensorDesc& t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.rank; ++i) n *= t.dims[i];
  return n;
}

DType dtype_of(ElementType type) {
  return type == ElementType::kF16 ? DType::kF16 : type == ElementType::kBF16 ? DType::kBF16 : DType::kF32;
}

constexpr const char* kMaskNames[] = {"full_row_ptr", "full_col_idx", "part_row_ptr", "part_col_idx",
                                      "bitmap",       "row_order",    "mask_index"};

}  // namespace

int32_t AttentionCore::bias_input() const {
  return config_.bias_kind == static_cast<int32_t>(BiasKind::kNone) ? -1 : mask_input(kMaskInputs);
}

int32_t AttentionCore::kv_input() const {
  if (config_.kv_kind == static_cast<int32_t>(KvKind::kNone)) return -1;
  return mask_input(kMaskInputs) + (bias_input() >= 0);
}

int32_t AttentionCore::shape_input() const {
  if (!config_.packed() || config_.seq > 0) return -1;
  return mask_input(kMaskInputs) + (bias_input() >= 0) + (kv_input() >= 0);
}

int32_t AttentionCore::num_inputs() const {
  return mask_input(kMaskInputs) + (bias_input() >= 0) + (kv_input() >= 0) + (shape_input() >= 0);
}

// Whether the kernel runs with input 0's type: asked of check, for inputs as large as the mask.
bool AttentionCore::kernel_takes(const TensorDesc* in) const {
  const AttentionConfig& c = config_;
  const ElementType type = in[0].type;
  constexpr int64_t kPlenty = int64_t{1} << 50;
  const bool relative = c.bias_kind == static_cast<int32_t>(BiasKind::kRelative);
  const int64_t seq_kv = c.mask_seq_kv, seq_q = relative && c.rel_rq < c.mask_seq_q ? c.rel_rq : c.mask_seq_q;
  TensorDesc made[kMaxTensors];
  if (c.packed()) {
    const int64_t width = int64_t{c.num_heads + c.num_kv_heads} * c.head_dim + int64_t{c.num_kv_heads} * c.v_head_dim;
    made[0] = {type, 2, {c.seq > 0 ? c.seq : seq_q, width}};
  } else {
    for (const Tensor t : {kQ, kK, kV}) {
      const int64_t heads = t == kQ ? c.num_heads : c.num_kv_heads, seq = t == kQ ? seq_q : seq_kv;
      const TensorDesc& given = in[t];
      const int64_t last = given.rank == 3 || given.rank == 4 ? given.dims[given.rank - 1] : -1;
      const int64_t dim = given.rank == 3 ? last / heads : last;
      if (dim <= 0) return true;  // not known yet
      if (c.layout_of(t) == Layout::kBHSD)
        made[t] = {type, 4, {1, heads, seq, dim}};
      else
        made[t] = {type, 4, {1, seq, heads, dim}};
    }
  }
  for (int32_t i = 0; i < kMaskInputs; ++i) made[mask_input(static_cast<MaskInput>(i))] = {ElementType::kI32, 1, {kPlenty}};
  made[mask_input(kMaskIndex)] = {ElementType::kI32, 2, {1, 1}};
  const int64_t rows = c.packed() && c.seq > 0 ? c.seq : seq_q, keys = c.packed() ? rows : seq_kv;
  if (relative)
    made[bias_input()] = {type, 2, {1, int64_t{c.rel_rq} + keys - 1}};
  else if (bias_input() >= 0)
    made[bias_input()] = {type, 4, {1, 1, rows, keys}};
  if (kv_input() >= 0) {
    const bool mask = c.kv_kind == static_cast<int32_t>(KvKind::kMask);
    made[kv_input()] = {ElementType::kI32, mask ? 2 : 1, {1, keys}};
  }
  if (shape_input() >= 0) made[shape_input()] = {type, 2, {1, rows}};
  size_t bytes;
  char error[256];
  return check(made, num_inputs(), bytes, error, sizeof error) == nullptr;
}

bool AttentionCore::supports(int32_t pos, const TensorDesc* tensors) const {
  if (pos < 0 || pos > num_inputs()) return false;
  const ElementType type = tensors[pos].type, first = tensors[0].type;
  const bool floating = type == ElementType::kF16 || type == ElementType::kBF16 || type == ElementType::kF32;
  if (pos == 0) return floating && kernel_takes(tensors);
  if (pos == shape_input()) return type == first || type == ElementType::kI32;
  const bool ints = (pos >= mask_input(kFullRowPtr) && pos <= mask_input(kMaskIndex)) || pos == kv_input();
  return type == (ints ? ElementType::kI32 : first);
}

const char* AttentionCore::plan(const TensorDesc* in, int32_t n, AttentionParams& p, char* error, size_t size) const {
  const AttentionConfig& c = config_;
  if (n != num_inputs()) return fail(error, size, "%d inputs, %d expected", n, num_inputs());
  p = AttentionParams{};
  const int64_t hq = c.num_heads, hk = c.num_kv_heads;
  if (c.packed()) {
    const int64_t width = (hq + hk) * c.head_dim + hk * c.v_head_dim;
    const TensorDesc& qkv = in[0];
    const TensorDesc* const carrier = c.seq > 0 ? nullptr : &in[shape_input()];
    if (carrier && (carrier->rank < 2 || !small(carrier->dims[0]) || !small(carrier->dims[1]) || qkv.rank != 2 ||
                    carrier->dims[0] * carrier->dims[1] != qkv.dims[0]))
      return fail(error, size, "the last input is not [B, S, ...] with B*S the rows of the packed input");
    const int64_t seq = carrier ? carrier->dims[1] : c.seq;
    if (qkv.rank != 2 || qkv.dims[1] != width || !small(seq) || !small(qkv.dims[0]) || qkv.dims[0] % seq != 0)
      return fail(error, size, "the packed input is not [B*S, %lld] with S = %lld", static_cast<long long>(width),
                  static_cast<long long>(seq));
    p.batch = static_cast<int32_t>(qkv.dims[0] / seq);
    p.seq_q = p.seq_kv = static_cast<int32_t>(seq);
    p.dim = c.head_dim;
    p.v_dim = c.v_head_dim;
    p.q = p.k = {nullptr, seq * width, c.head_dim, width};
    p.v = {nullptr, seq * width, c.v_head_dim, width};
  } else {
    Heads q, k, v;
    if (!read_heads(in[0], c.layout_of(kQ), hq, q)) return fail(error, size, "Q does not have the shape its layout asks for");
    if (!read_heads(in[1], c.layout_of(kK), hk, k)) return fail(error, size, "K does not have the shape its layout asks for");
    if (!read_heads(in[2], c.layout_of(kV), hk, v)) return fail(error, size, "V does not have the shape its layout asks for");
    if (q.batch != k.batch || q.batch != v.batch || k.seq != v.seq || q.dim != k.dim)
      return fail(error, size, "Q, K and V do not fit together");
    p.batch = static_cast<int32_t>(q.batch);
    p.seq_q = static_cast<int32_t>(q.seq);
    p.seq_kv = static_cast<int32_t>(k.seq);
    p.dim = static_cast<int32_t>(q.dim);
    p.v_dim = static_cast<int32_t>(v.dim);
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    if ((c.head_dim && c.head_dim != p.dim) || (c.v_head_dim && c.v_head_dim != p.v_dim))
      return fail(error, size, "head sizes %d and %d are not those of the node's attributes", p.dim, p.v_dim);
  }
  p.o = output_view(c.layout_of(kO), hq, p.seq_q, p.v_dim);
  p.heads = c.num_heads;
  p.kv_heads = c.num_kv_heads;
  p.dtype = dtype_of(in[0].type);
  p.f32_math = static_cast<F32Math>(c.f32_math);
  p.scale = c.scale;
  p.softcap = c.softcap;
  if (p.seq_q > c.mask_seq_q || p.seq_kv > c.mask_seq_kv)
    return fail(error, size, "the mask was encoded for %d x %d, the inputs want %d x %d", c.mask_seq_q, c.mask_seq_kv, p.seq_q,
                p.seq_kv);

  MaskView& m = p.mask;
  const TensorDesc& index = in[mask_input(kMaskIndex)];
  if (index.rank != 2) return fail(error, size, "mask_index does not have rank 2");
  m.index_b = static_cast<int32_t>(index.dims[0]);
  m.index_h = static_cast<int32_t>(index.dims[1]);
  m.n_masks = c.mask_n_masks;
  m.rows = c.mask_rows;
  m.cols = c.mask_cols;
  m.n_full = c.mask_n_full;
  m.n_part = c.mask_n_part;
  m.tile_m = c.tile_m;
  m.tile_n = c.tile_n;
  m.split_rows = c.split_rows;
  m.bitmap_order = c.mask_fragment_order ? BitmapOrder::kFragments : BitmapOrder::kTiles;
  // A kernel reads as many entries as the attributes promise: the arrays must really hold them.
  const int64_t pointers = m.n_masks * (int64_t{m.rows} + 1);
  const int64_t tile_words = int64_t{m.tile_m / 8} * (m.tile_n / 8) * 2;
  const int64_t wanted[] = {pointers, m.n_full, pointers, m.n_part, m.n_part * tile_words, int64_t{m.n_masks} * m.rows, 0};
  for (int32_t i = 0; i < kMaskInputs; ++i) {
    const int64_t have = elements(in[mask_input(static_cast<MaskInput>(i))]);
    if (have < wanted[i] || have < 1)
      return fail(error, size, "%s has %lld entries, %lld are expected", kMaskNames[i], static_cast<long long>(have),
                  static_cast<long long>(wanted[i]));
  }

  p.bias_kind = static_cast<BiasKind>(c.bias_kind);
  if (p.bias_kind == BiasKind::kDense) {
    const TensorDesc& b = in[bias_input()];
    const auto fits = [](int64_t d, int64_t want) { return d == 1 || d == want; };
    if (b.rank != 4 || !fits(b.dims[0], p.batch) || !fits(b.dims[1], hq) || b.dims[2] != p.seq_q || b.dims[3] != p.seq_kv)
      return fail(error, size, "the bias is not [1 or B, 1 or H, %d, %d]", p.seq_q, p.seq_kv);
    p.bias_stride_q = b.dims[3];
    p.bias_stride_h = b.dims[1] == 1 ? 0 : b.dims[2] * b.dims[3];
    p.bias_stride_b = b.dims[0] == 1 ? 0 : b.dims[1] * b.dims[2] * b.dims[3];
  } else if (p.bias_kind == BiasKind::kRelative) {
    const TensorDesc& b = in[bias_input()];
    if (b.rank != 2 || (b.dims[0] != 1 && b.dims[0] != hq) || !small(b.dims[1]))
      return fail(error, size, "the relative bias is not [1 or H, Rq + Rk - 1]");
    p.bias_stride_h = b.dims[0] == 1 ? 0 : b.dims[1];
    p.rel_rq = c.rel_rq;
    p.rel_len = static_cast<int32_t>(b.dims[1]);
  }
  p.kv_kind = static_cast<KvKind>(c.kv_kind);
  if (p.kv_kind != KvKind::kNone) {
    const TensorDesc& kv = in[kv_input()];
    const bool mask = p.kv_kind == KvKind::kMask;
    if (kv.rank != (mask ? 2 : 1) || kv.dims[0] != p.batch || (mask && kv.dims[1] != p.seq_kv))
      return fail(error, size, mask ? "kv_mask is not [B, S_kv]" : "kv_mask is not [B]");
    p.kv_stride = mask ? kv.dims[1] : 1;
  }
  p.masked_row = static_cast<MaskedRow>(c.masked_row);
  p.kernel = static_cast<Kernel>(c.kernel);
  p.splits = c.splits;
  p.max_row_tiles = c.mask_max_row_tiles;
  return nullptr;
}

const char* AttentionCore::check(const TensorDesc* in, int32_t n, size_t& bytes, char* error, size_t size) const {
  AttentionParams p;
  if (const char* why = plan(in, n, p, error, size)) return why;
  // The outcome depends on no pointer, but parameters are checked whole: any aligned address will do.
  void* const somewhere = reinterpret_cast<void*>(uintptr_t{256});
  p.q.ptr = p.k.ptr = p.v.ptr = p.o.ptr = somewhere;
  const int32_t* const ints = static_cast<const int32_t*>(somewhere);
  p.mask.full_row_ptr = p.mask.full_col_idx = p.mask.part_row_ptr = p.mask.part_col_idx = ints;
  p.mask.row_order = p.mask.mask_index = p.kv = ints;
  p.mask.bitmap = static_cast<const uint2*>(somewhere);
  p.bias = somewhere;
  if (const char* why = attention_unsupported(p)) return fail(error, size, "no kernel runs this node: %s", why);
  bytes = attention_workspace_bytes(p);
  return nullptr;
}

const char* AttentionCore::refused_here(char* error, size_t size) const {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();  // not left behind for others to find
    return nullptr;
  }
  const char* const why = architecture_refusal(static_cast<Kernel>(config_.kernel), major, minor);
  return why ? fail(error, size, "%s; this one has %d.%d", why, major, minor) : nullptr;
}

const char* AttentionCore::enqueue(const TensorDesc* in, int32_t n, const void* const* data, void* out, void* workspace,
                                   cudaStream_t stream, char* error, size_t size) const {
  AttentionParams p;
  if (const char* why = plan(in, n, p, error, size)) return why;
  const auto input = [&](int32_t i) { return const_cast<void*>(data[i]); };
  p.q.ptr = input(0);
  if (config_.packed()) {
    const size_t element = p.dtype == DType::kF32 ? 4 : 2;
    char* const base = static_cast<char*>(p.q.ptr);
    p.k.ptr = base + static_cast<size_t>(p.heads) * p.dim * element;
    p.v.ptr = base + static_cast<size_t>(p.heads + p.kv_heads) * p.dim * element;
  } else {
    p.k.ptr = input(1);
    p.v.ptr = input(2);
  }
  p.o.ptr = out;
  const auto ints = [&](MaskInput which) { return static_cast<const int32_t*>(data[mask_input(which)]); };
  p.mask.full_row_ptr = ints(kFullRowPtr);
  p.mask.full_col_idx = ints(kFullColIdx);
  p.mask.part_row_ptr = ints(kPartRowPtr);
  p.mask.part_col_idx = ints(kPartColIdx);
  p.mask.bitmap = static_cast<const uint2*>(data[mask_input(kBitmap)]);
  p.mask.row_order = ints(kRowOrder);
  p.mask.mask_index = ints(kMaskIndex);
  if (bias_input() >= 0) p.bias = data[bias_input()];
  if (kv_input() >= 0) p.kv = static_cast<const int32_t*>(data[kv_input()]);
  p.workspace = workspace;
  p.workspace_bytes = attention_workspace_bytes(p);
  if (const char* why = attention_unsupported(p)) return fail(error, size, "no kernel runs this node: %s", why);
  const cudaError_t status = attention_forward(p, stream);
  if (status != cudaSuccess) return fail(error, size, "launch failed: %s", cudaGetErrorString(status));
  return nullptr;
}

}  // namespace stof
