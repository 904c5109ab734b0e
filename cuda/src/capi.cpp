// C face of the kernels, for ctypes: tests, benchmarks and tuning. The only symbols libstof_capi.so exports.
#include "stof/attention.h"
#include "stof/fused.h"

#define STOF_API extern "C" __attribute__((visibility("default")))

// Raised with every change of stof::AttentionParams.
STOF_API int stof_abi_version() { return 1; }
STOF_API size_t stof_sizeof_attention_params() { return sizeof(stof::AttentionParams); }

STOF_API const char* stof_attention_unsupported(const stof::AttentionParams* p) { return stof::attention_unsupported(*p); }
STOF_API size_t stof_attention_workspace_bytes(const stof::AttentionParams* p) { return stof::attention_workspace_bytes(*p); }
STOF_API int stof_attention_forward(const stof::AttentionParams* p, void* stream) {
  return static_cast<int>(stof::attention_forward(*p, static_cast<cudaStream_t>(stream)));
}
STOF_API const char* stof_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Raised with every change of stof::FusedParams, stof::FusedConfig or the functions below.
STOF_API int stof_fused_abi_version() { return 4; }
STOF_API size_t stof_sizeof_fused_params() { return sizeof(stof::FusedParams); }
STOF_API size_t stof_sizeof_fused_config() { return sizeof(stof::FusedConfig); }
STOF_API int stof_fused_config_count(int template_id) {
  return stof::fused_config_count(static_cast<stof::FusedTemplate>(template_id));
}
STOF_API const stof::FusedConfig* stof_fused_config(int template_id, int index) {
  return stof::fused_config(static_cast<stof::FusedTemplate>(template_id), index);
}
STOF_API int stof_fused_auto_config(const stof::FusedParams* p, int sms) { return stof::fused_auto_config(*p, sms); }
STOF_API const char* stof_fused_unsupported(const stof::FusedParams* p) { return stof::fused_unsupported(*p); }
STOF_API size_t stof_fused_workspace_bytes(const stof::FusedParams* p) { return stof::fused_workspace_bytes(*p); }
STOF_API const char* stof_cublaslt_problem() { return stof::cublaslt_problem(); }
STOF_API int stof_fused_launch(const stof::FusedParams* p, void* stream) {
  return static_cast<int>(stof::fused_launch(*p, static_cast<cudaStream_t>(stream)));
}
