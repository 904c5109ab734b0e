#include "gemm_region.h"

#include "fail.h"
#include "stof/fused.h"

namespace stof {
namespace {

bool small(int64_t v) { return v > 0 && v <= INT32_MAX; }

FusedTemplate fused_template(RegionTemplate id) {
  return id == RegionTemplate::kGatedMlp   ? FusedTemplate::kGatedMlp
         : id == RegionTemplate::kGemmNorm ? FusedTemplate::kGemmNorm
                                           : FusedTemplate::kGemmEpilogue;
}

// Inputs in order: x, w, [w_up], [bias], [b_up], [residual], [rotation], [scale], [shift]. Outputs: the rows, [their sum ahead of a norm].
class GemmRegion final : public RegionCore {
 public:
  GemmRegion(const RegionConfig& config, int32_t variant)
      : template_(fused_template(config.template_id)),
        gated_(template_ == FusedTemplate::kGatedMlp),
        bias_(config.has_bias != 0),
        residual_(config.has_residual != 0),
        scale_(config.has_scale != 0),
        shift_(config.has_shift != 0),
        keep_sum_(config.keep_sum != 0),
        activation_(static_cast<Activation>(config.activation)),
        rotated_columns_(config.rotated_columns),
        head_dim_(config.head_dim),
        norm_(static_cast<Norm>(config.norm)),
        epsilon_(config.epsilon),
        variant_(variant) {}

  int32_t num_inputs() const override { return shift_input() + shift_; }
  int32_t num_outputs() const override { return 1 + keep_sum_; }
  ElementType output_type(int32_t, const ElementType* inputs) const override { return inputs[0]; }

  bool output_dims(int32_t, DimBuilder& builder, OutputDims& out) const override {
    out.rank = builder.rank(0);
    if ((out.rank != 2 && out.rank != 3) || builder.rank(1) != 2) return false;
    for (int32_t i = 0; i < out.rank - 1; ++i) out.dims[i] = builder.input(0, i);
    out.dims[out.rank - 1] = builder.input(1, 1);
    return true;
  }

  bool supports(int32_t pos, const TensorDesc* tensors) const override {
    const ElementType type = tensors[pos].type;
    if (rotated_columns_ && pos == rotation_input()) return type == ElementType::kF32;
    return pos == 0 ? type == ElementType::kF16 || type == ElementType::kBF16 : type == tensors[0].type;
  }

  const char* check(const TensorDesc* in, int32_t n, size_t& bytes, char* error, size_t size) const override {
    FusedParams p;
    if (const char* why = plan(in, n, p, error, size)) return why;
    // The outcome depends on no pointer, but parameters are checked whole: any aligned address will do.
    const void* const somewhere = reinterpret_cast<const void*>(uintptr_t{256});
    const void* pointers[6] = {somewhere, somewhere, somewhere, somewhere, somewhere, somewhere};  // no template has more inputs
    void* const outputs[2] = {reinterpret_cast<void*>(uintptr_t{512}), reinterpret_cast<void*>(uintptr_t{768})};
    place(p, pointers, outputs);
    if (const char* why = fused_unsupported(p)) return fail(error, size, "no kernel runs this region: %s", why);
    bytes = fused_workspace_bytes(p);
    return nullptr;
  }

  const char* refused_here(char* error, size_t size) const override {
    if (variant_ == kCublasLtConfig) {
      const char* const why = cublaslt_problem();
      return why ? fail(error, size, "config 'cublaslt' can not run here: %s", why) : nullptr;
    }
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
      cudaGetLastError();  // not left behind for others to find
      return nullptr;
    }
    if (major == 9 && minor == 0) return nullptr;
    return fail(error, size,
                "the GEMM templates need a Hopper GPU (compute capability 9.0); this one has %d.%d: build the engine on the GPU "
                "that it shall run on",
                major, minor);
  }

  const char* prepare(char* error, size_t size) override {
    const cudaError_t status = variant_ == kCublasLtConfig ? cublaslt_prepare() : cudaSuccess;
    return status == cudaSuccess ? nullptr : fail(error, size, "cuBLASLt can not start: %s", cudaGetErrorString(status));
  }

  const char* enqueue(const TensorDesc* in, int32_t n, const void* const* data, void* const* out, void* workspace,
                      cudaStream_t stream, char* error, size_t size) const override {
    FusedParams p;
    if (const char* why = plan(in, n, p, error, size)) return why;
    place(p, data, out);
    p.workspace = workspace;
    p.workspace_bytes = fused_workspace_bytes(p);
    if (const char* why = fused_unsupported(p)) return fail(error, size, "no kernel runs this region: %s", why);
    const cudaError_t status = fused_launch(p, stream);
    return status == cudaSuccess ? nullptr : fail(error, size, "launch failed: %s", cudaGetErrorString(status));
  }

 private:
  int32_t bias_input() const { return gated_ ? 3 : 2; }
  int32_t residual_input() const { return bias_input() + (bias_ ? gated_ ? 2 : 1 : 0); }
  int32_t rotation_input() const { return residual_input() + residual_; }
  int32_t scale_input() const { return rotation_input() + (rotated_columns_ > 0); }
  int32_t shift_input() const { return scale_input() + scale_; }

  // All of `p` but the pointers.
  const char* plan(const TensorDesc* in, int32_t n, FusedParams& p, char* error, size_t size) const {
    if (n != num_inputs()) return fail(error, size, "%d inputs, %d expected", n, num_inputs());
    p = FusedParams{};
    const TensorDesc &x = in[0], &w = in[1];
    if (x.rank != 2 && x.rank != 3) return fail(error, size, "x has rank %d, neither 2 nor 3", x.rank);
    int64_t rows = 1;
    for (int32_t i = 0; i < x.rank - 1; ++i) rows = small(rows) && small(x.dims[i]) ? rows * x.dims[i] : 0;
    const int64_t k = x.dims[x.rank - 1];
    if (!small(rows) || !small(k)) return fail(error, size, "x has a size that is not positive or too large");
    if (w.rank != 2 || w.dims[0] != k || !small(w.dims[1]))
      return fail(error, size, "the weights are not [%lld, N]", static_cast<long long>(k));
    const int64_t columns = w.dims[1];
    if (gated_ && (in[2].rank != 2 || in[2].dims[0] != k || in[2].dims[1] != columns))
      return fail(error, size, "the second weights are not [%lld, %lld]", static_cast<long long>(k), static_cast<long long>(columns));
    for (int32_t i = bias_input(); i < residual_input(); ++i)
      if (in[i].rank != 1 || in[i].dims[0] != columns)
        return fail(error, size, "a bias is not [%lld]", static_cast<long long>(columns));
    if (residual_) {
      const TensorDesc& r = in[residual_input()];
      bool fits = r.rank == x.rank && r.dims[r.rank - 1] == columns;
      for (int32_t i = 0; fits && i < x.rank - 1; ++i) fits = r.dims[i] == x.dims[i];
      if (!fits) return fail(error, size, "the residual does not have the output's shape");
    }
    if (rotated_columns_) {
      const TensorDesc& r = in[rotation_input()];
      if (r.rank != 2 || !small(r.dims[0]) || r.dims[1] != head_dim_)
        return fail(error, size, "the rotation is not [S, %d]", head_dim_);
      const int64_t seq = x.rank == 3 ? x.dims[1] : r.dims[0];
      if (seq != r.dims[0] || rows % seq != 0)
        return fail(error, size, "x has other positions than the rotation's %lld", static_cast<long long>(r.dims[0]));
      p.rotated_columns = rotated_columns_;
      p.head_dim = head_dim_;
      p.positions = static_cast<int32_t>(r.dims[0]);
    }
    for (int32_t i = scale_input(); i < num_inputs(); ++i)
      if (in[i].rank != 1 || in[i].dims[0] != columns)
        return fail(error, size, "the norm's scale or shift is not [%lld]", static_cast<long long>(columns));
    p.template_id = template_;
    p.config = variant_;
    p.dtype = x.type == ElementType::kF16 ? DType::kF16 : x.type == ElementType::kBF16 ? DType::kBF16 : DType::kF32;
    p.activation = activation_;
    p.m = static_cast<int32_t>(rows);
    p.n = static_cast<int32_t>(columns);
    p.k = static_cast<int32_t>(k);
    p.stride_a = k;
    p.stride_b = p.stride_b2 = p.stride_residual = p.stride_out = p.stride_sum = columns;
    p.norm = norm_;
    p.epsilon = epsilon_;
    return nullptr;
  }

  void place(FusedParams& p, const void* const* data, void* const* out) const {
    p.a = data[0];
    p.b = data[1];
    if (gated_) p.b2 = data[2];
    if (bias_) p.bias = data[bias_input()];
    if (bias_ && gated_) p.bias2 = data[bias_input() + 1];
    if (residual_) p.residual = data[residual_input()];
    if (rotated_columns_) p.rotation = static_cast<const float*>(data[rotation_input()]);
    if (scale_) p.scale = data[scale_input()];
    if (shift_) p.shift = data[shift_input()];
    p.out = out[0];
    if (keep_sum_) p.sum = out[1];
  }

  FusedTemplate template_;
  bool gated_, bias_, residual_, scale_, shift_, keep_sum_;
  Activation activation_;
  int32_t rotated_columns_, head_dim_;
  Norm norm_;
  float epsilon_;
  int32_t variant_;
};

}  // namespace

std::unique_ptr<RegionCore> make_gemm_region(const RegionConfig& config, char* error, size_t error_size) {
  const FusedTemplate id = fused_template(config.template_id);
  if (config.config == "cublaslt") {
    if (id == FusedTemplate::kGemmEpilogue) return std::make_unique<GemmRegion>(config, kCublasLtConfig);
    fail(error, error_size, "config 'cublaslt' is for template 'gemm_epilogue' only");
    return nullptr;
  }
  const int32_t count = fused_config_count(id);
  if (count == 0) {
    fail(error, error_size, "this library was built without sm_90a machine code, which the GEMM templates need");
    return nullptr;
  }
  if (config.config == "auto") return std::make_unique<GemmRegion>(config, kAutoConfig);
  for (int32_t i = 0; i < count; ++i)
    if (config.config == fused_config(id, i)->name) return std::make_unique<GemmRegion>(config, i);
  fail(error, error_size, "attribute 'config' is '%s': this library has no such variant", config.config.c_str());
  return nullptr;
}

}  // namespace stof
