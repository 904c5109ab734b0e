// Fused GEMM regions: the public face of cuda/src/fused. POD parameters, a stream, a cudaError_t.
// No allocation, no synchronisation, no global state (but for kCublasLtConfig): every call can be captured in a CUDA graph.
//
//   kGemmEpilogue  out = activation(a b + bias) + residual, or rotated(a b + bias)
//   kGatedMlp      out = activation(a b + bias) * (a b2 + bias2)
//   kGemmNorm      sum = a b + bias + residual; out = norm(sum) * scale + shift, with the mean and variance of each row of the
//                  unrounded sum: LayerNorm (sum - mean) / sqrt(variance + epsilon), RMSNorm sum / sqrt(mean square + epsilon)
//
// rotated(): rotary position embedding of the first columns, which are heads. Columns 2j and 2j + 1 of a head are a pair (x, y), which becomes
// (x cos - y sin, y cos + x sin) with the cos and sin that `rotation` holds for j and the row's position, row mod positions.
//
// Products are summed in fp32, the epilogue is computed in fp32, and the result is rounded once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "stof/attention.h"

namespace stof {

enum class FusedTemplate : int32_t { kGemmEpilogue = 0, kGatedMlp = 1, kGemmNorm = 2 };
enum class Norm : int32_t { kLayer = 0, kRms = 1 };
enum class Activation : int32_t { kNone = 0, kRelu = 1, kGeluErf = 2, kGeluTanh = 3, kSilu = 4 };

constexpr int32_t kAutoConfig = -1;  // fused_launch picks one from the sizes
// kGemmEpilogue by cuBLASLt, on any GPU from sm_80 on, where cublaslt_problem() is null: activation none, ReLU or GELU (tanh), a residual
// without activation, no rotation. The algorithm is the library's own choice, made at the first launch with such sizes and kept.
constexpr int32_t kCublasLtConfig = -2;

// Row-major matrices; strides of rows in elements. 16-byte alignment of pointers and rows is required.
struct FusedParams {
  FusedTemplate template_id;
  int32_t config;       // index into fused_config(), kAutoConfig or kCublasLtConfig
  DType dtype;          // kF16, kBF16: of every tensor
  Activation activation;
  int32_t m, n, k;      // n, k: multiples of 8
  int32_t reserved;     // 0
  const void* a;        // [m, k]
  const void* b;        // [k, n], as ONNX MatMul holds weights
  const void* b2;       // [k, n]: the factor without activation of kGatedMlp, else null
  const void* bias;     // [n] or null
  const void* bias2;    // [n] or null; kGatedMlp only
  const void* residual; // [m, n] or null; may be `out` or `sum` itself; not for kGatedMlp
  void* out;            // [m, n]
  int64_t stride_a, stride_b, stride_b2, stride_residual, stride_out;
  void* workspace;      // fused_workspace_bytes(), 256-byte aligned; may be null when that is 0
  size_t workspace_bytes;
  const float* rotation;    // [positions, head_dim / 2] pairs (cos, sin), 16-byte aligned; or null. kGemmEpilogue only
  int32_t rotated_columns;  // heads times head_dim; 0 without rotation, like the two below
  int32_t head_dim;         // a multiple of 8
  int32_t positions;
  int32_t reserved2;  // 0
  // kGemmNorm only; zero elsewhere.
  const void* scale;    // [n] or null: 1
  const void* shift;    // [n] or null: 0
  void* sum;            // [m, n] or null: not wanted
  int64_t stride_sum;
  Norm norm;
  float epsilon;
};

// One compiled variant of a template. Sizes are those of the output tile and of the step along k.
struct FusedConfig {
  char name[32];        // unique within its template; what nodes and plans name it by
  int32_t tile_m, tile_n, tile_k, stages;
  int32_t cluster_m;    // blocks that share one tile of b
  int32_t cluster_n;    // blocks side by side that share one tile of a, at most: kGemmNorm's own whole rows
  int32_t arch;         // 90: needs sm_90a machine code
};

// The variants of a template in this build: 0 for an unknown one, or where the library was built without its architecture.
int32_t fused_config_count(FusedTemplate template_id);
// Null when there is no such index.
const FusedConfig* fused_config(FusedTemplate template_id, int32_t index);
// The variant that kAutoConfig stands for at p's sizes on a GPU of `sms` multiprocessors; -1 when there is none.
int32_t fused_auto_config(const FusedParams& p, int32_t sms);

// Bytes of workspace `p` needs. Pure arithmetic on p's sizes.
size_t fused_workspace_bytes(const FusedParams& p);

// nullptr when some variant can run `p`, else a static sentence saying what is not supported. Does not ask the GPU.
const char* fused_unsupported(const FusedParams& p);

// nullptr when cuBLASLt is at hand: libcublasLt.so of version 11.4 to 13, opened at the first call. Else a static sentence.
const char* cublaslt_problem();
// Ahead of launches with kCublasLtConfig on the current device that are captured: allocates what cuBLASLt keeps for a device.
cudaError_t cublaslt_prepare();

// Enqueues the region. cudaErrorInvalidValue when fused_unsupported(p) is not null or the workspace is too small.
cudaError_t fused_launch(const FusedParams& p, cudaStream_t stream);

}  // namespace stof
